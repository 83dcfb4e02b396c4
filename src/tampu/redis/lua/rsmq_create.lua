-- Creates an RSMQ queue and adds it to the index, atomically.
--
-- KEYS  1 hash of the queue, 2 index of all queues
-- ARGV  1 vt   2 delay   3 maxsize   4 name of the queue
--
-- Reply 1: created. 0: it exists; its attributes stay as they are.
--
-- An existing queue is added to the index as well: the JavaScript client does that in a separate step, and may have
-- crashed in between and left a queue that is not listed.

local hash, index = KEYS[1], KEYS[2]
redis.call('SISMEMBER', index, ARGV[4])  -- fails before the first write if the index has the wrong type

local seconds = redis.call('TIME')[1]
local created = redis.call('HSETNX', hash, 'vt', ARGV[1])
redis.call('HSETNX', hash, 'delay', ARGV[2])
redis.call('HSETNX', hash, 'maxsize', ARGV[3])
redis.call('HSETNX', hash, 'created', seconds)
redis.call('HSETNX', hash, 'modified', seconds)
redis.call('SADD', index, ARGV[4])
return created
