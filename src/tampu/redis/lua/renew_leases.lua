-- Renews the leases of entries that the consumer still owns: resets their idle time, keeps their delivery count.
-- Claiming without this check would take back entries that another consumer owns by now. Also records that the fleet is
-- alive, and how long this consumer's leases last: a worker with shorter leases must not take over its entries.
--
-- KEYS  1 stream, 2 alive, 3 grace, 4 leases
-- ARGV  1 group, 2 consumer, 3 ms without a renewal after which it is a stall, 4 grace after a stall in ms, 5 '1' to
--       renew all pending entries of the consumer, 6 duration of its leases in ms, then entry ids, oldest first
-- Reply the ids that are no longer owned

--@include lib/stall.lua

note_stall(KEYS[2], KEYS[3], ARGV[3], ARGV[4])
if redis.pcall('PEXPIRE', KEYS[2], ALIVE_MS) == 0 then
  redis.pcall('SET', KEYS[2], '1', 'PX', ALIVE_MS)
end
redis.pcall('HSET', KEYS[4], ARGV[2], ARGV[6])
redis.pcall('PEXPIRE', KEYS[4], ALIVE_MS)

local all = ARGV[5] == '1'
if #ARGV == 6 and not all then
  return {}
end
local wanted = {}
for i = 7, #ARGV do
  wanted[ARGV[i]] = true
end
local first, last, most = ARGV[7], ARGV[#ARGV], 100000
if all then
  first, last, most = '-', '+', 5000
end
local renew = {'XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0}
for _, entry in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], first, last, most, ARGV[2])) do
  if all or wanted[entry[1]] then
    renew[#renew + 1] = entry[1]
    wanted[entry[1]] = nil
  end
end
if #renew > 5 then
  renew[#renew + 1] = 'JUSTID'
  redis.call(unpack(renew))
end
local lost = {}
for i = 7, #ARGV do
  if wanted[ARGV[i]] then
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
