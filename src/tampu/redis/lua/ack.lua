-- Acknowledges and deletes entries on servers without XACKDEL, so that a cut cannot come between the two.
--
-- KEYS  1 stream
-- ARGV  1 group, then entry ids
-- Reply number acknowledged

local ids = {}
for i = 2, #ARGV do
  ids[i - 1] = ARGV[i]
end
local acked = redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
redis.call('XDEL', KEYS[1], unpack(ids))
return acked
