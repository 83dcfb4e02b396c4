-- Deletes an RSMQ queue with all its messages and removes it from the index.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue, 3 index of all queues
-- ARGV  1 name of the queue
--
-- Reply 1: deleted. 0: no such queue.

redis.call('SISMEMBER', KEYS[3], ARGV[1])  -- fails before the first write if the index has the wrong type

-- UNLINK frees the messages in the background: DEL would block the server if there are many.
local gone = redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('SREM', KEYS[3], ARGV[1])
return gone > 0 and 1 or 0
