-- Takes or renews a lock.
--
-- KEYS  1 lock
-- ARGV  1 holder, 2 TTL in seconds
-- Reply 1 ours, 0 somebody else's

local holder = redis.call('GET', KEYS[1])
if not holder then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
  return 1
end
if holder == ARGV[1] then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
  return 1
end
return 0
