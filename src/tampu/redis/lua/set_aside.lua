-- Removes a repeatable job that cannot be read from the schedule, unless it was replaced since. Its hash is kept.
--
-- KEYS  1 zset of next fires, 2 hash of the spec
-- ARGV  1 spec key, 2 score that was read, 3 the spec that was read, '' if there was none
-- Reply 1 removed, 0 it was replaced

if redis.call('ZSCORE', KEYS[1], ARGV[1]) ~= ARGV[2] or (redis.call('HGET', KEYS[2], 'spec') or '') ~= ARGV[3] then
  return 0
end
return redis.call('ZREM', KEYS[1], ARGV[1])
