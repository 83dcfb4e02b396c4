-- Removes a repeatable job. A fire in progress finds the spec gone and writes nothing.
--
-- KEYS  1 zset of next fires, 2 hash of the spec
-- ARGV  1 spec key
-- Reply 1 removed, 0 it did not exist

local removed = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return removed
