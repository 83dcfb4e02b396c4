-- Deletes an RSMQ queue with all its messages and takes it out of the index.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue, 3 index of all queues
-- ARGV  1 name of the queue
--
-- Reply 1: deleted. 0: there was no such queue.

redis.call('SISMEMBER', KEYS[3], ARGV[1])  -- an index of the wrong type stops us here, before the first write

-- UNLINK frees the messages in the background: DEL would hold up the server for as long as there are many.
local gone = redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('SREM', KEYS[3], ARGV[1])
return gone > 0 and 1 or 0
