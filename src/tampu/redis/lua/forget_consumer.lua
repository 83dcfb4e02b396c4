-- Deletes a consumer's name if it has no pending entries: DELCONSUMER would lose them.
--
-- KEYS  1 stream, 2 leases
-- ARGV  1 group, 2 consumer
-- Reply 1 if it was deleted, else 0

local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if pending.err or #pending > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
redis.pcall('HDEL', KEYS[2], ARGV[2])
return 1
