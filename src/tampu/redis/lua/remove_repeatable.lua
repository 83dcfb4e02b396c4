-- Removes a repeatable job. Fires that are under way find their spec gone and write nothing.
--
-- KEYS  1 zset of next fires, 2 hash of the spec
-- ARGV  1 spec key
-- Reply 1 removed, 0 it was not there

local removed = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return removed
