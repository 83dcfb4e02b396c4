-- Renews the leases of entries that are still ours: their idle time starts anew, their delivery count stays.
-- Claiming blindly would take back entries that others own by now.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, then entry ids, oldest first; none: whatever is pending in our name
-- Reply the ids that are no longer ours

local wanted = {}
for i = 3, #ARGV do
  wanted[ARGV[i]] = true
end
local all = #ARGV == 2
local first, last, most = ARGV[3], ARGV[#ARGV], 100000
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
for i = 3, #ARGV do
  if wanted[ARGV[i]] then
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
