-- Releases a lock if this holder still has it.
--
-- KEYS  1 lock
-- ARGV  1 holder
-- Reply 1 released, 0 another holder has it, or it has expired

if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
