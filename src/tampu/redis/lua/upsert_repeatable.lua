-- Registers a repeatable job: writes its next fire and its spec, and resets its counter.
--
-- KEYS  1 zset of next fires, 2 hash of the spec
-- ARGV  1 next fire in ms, 2 spec key, 3 spec, 4 '1' to keep an identical spec
-- Reply 1 written, 0 an identical spec was kept

if ARGV[4] == '1' and redis.call('HGET', KEYS[2], 'spec') == ARGV[3] and redis.call('ZSCORE', KEYS[1], ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[2], 'spec', ARGV[3])
redis.call('HDEL', KEYS[2], 'fired')
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
return 1
