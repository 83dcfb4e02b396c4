-- Reads new entries of several streams, in order, until there is no more room. A stream that cannot be read does not
-- stop the others.
--
-- KEYS  1 to n streams
-- ARGV  1 group, 2 consumer, 3 maximum number of entries in total, then per stream its maximum
-- Reply per stream with entries or an error: {number of the stream from 0, entries} or {number, error text}

local room, found = tonumber(ARGV[3]), {}
for i, stream in ipairs(KEYS) do
  local count = math.min(tonumber(ARGV[3 + i]), room)
  if room <= 0 then
    break
  end
  if count > 0 then
    local reply = redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', count, 'STREAMS', stream, '>')
    if type(reply) == 'table' and reply.err then
      found[#found + 1] = {i - 1, reply.err}
    elseif reply and reply[1] and reply[1][2][1] then
      found[#found + 1] = {i - 1, reply[1][2]}
      room = room - #reply[1][2]
    end
  end
end
return found
