-- Takes over entries that nobody has touched for too long, and sweeps pending ids whose entries are gone.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 least idle time in ms, 4 most entries, then ids to leave alone (running here)
-- Reply {entries, swept}: per entry {id, fields, earlier deliveries}; swept is how many pending ids had no entry

local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local most = tonumber(ARGV[4])
local ours = {}
for i = 5, #ARGV do
  ours[ARGV[i]] = true
end
local taken, swept = {}, 0
for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', ARGV[3], '-', '+', most + #ARGV)) do
  if #taken >= most then
    break
  end
  local id = pending[1]
  if not ours[id] then
    -- The same idle time again: between two workers asking at once only one gets it.
    local claimed = redis.call('XCLAIM', stream, group, consumer, ARGV[3], id)
    if claimed[1] and claimed[1][2] then
      taken[#taken + 1] = {id, claimed[1][2], pending[4]}
    elseif #redis.call('XRANGE', stream, id, id) == 0 then
      redis.call('XACK', stream, group, id)
      swept = swept + 1
    end
  end
end
return {taken, swept}
