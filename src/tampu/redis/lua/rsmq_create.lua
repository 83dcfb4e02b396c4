-- Creates an RSMQ queue and enters it in the index, in one step.
--
-- KEYS  1 hash of the queue, 2 index of all queues
-- ARGV  1 vt   2 delay   3 maxsize   4 name of the queue
--
-- Reply 1: created. 0: it exists; its attributes stay as they are.
--
-- A queue that exists is entered in the index as well: the JavaScript client, which does that in a step of its own, may
-- have crashed in between and left a queue that nobody sees.

local hash, index = KEYS[1], KEYS[2]
redis.call('SISMEMBER', index, ARGV[4])  -- an index of the wrong type stops us here, before the first write

local seconds = redis.call('TIME')[1]
local created = redis.call('HSETNX', hash, 'vt', ARGV[1])
redis.call('HSETNX', hash, 'delay', ARGV[2])
redis.call('HSETNX', hash, 'maxsize', ARGV[3])
redis.call('HSETNX', hash, 'created', seconds)
redis.call('HSETNX', hash, 'modified', seconds)
redis.call('SADD', index, ARGV[4])
return created
