-- Acquires or renews a lock.
--
-- KEYS  1 lock
-- ARGV  1 holder, 2 TTL in seconds
-- Reply 0 if this holder has it; otherwise the ms until the other holder's lock expires, -1 if it has no TTL

local holder = redis.call('GET', KEYS[1])
if not holder then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
  return 0
end
if holder == ARGV[1] then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
  return 0
end
local left = redis.call('PTTL', KEYS[1])
return left == 0 and 1 or left
