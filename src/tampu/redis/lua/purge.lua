-- Deletes entries of the stream that no group has delivered yet: from behind the last one delivered, oldest first.
--
-- KEYS  1 stream
-- ARGV  1 most entries
-- Reply number deleted

local from = '-'
local function number(id)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  return tonumber(ms), tonumber(seq)
end
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then
  return 0
end
local last_ms, last_seq = -1, -1
for _, flat in ipairs(groups) do
  for i = 1, #flat, 2 do
    if flat[i] == 'last-delivered-id' then
      local ms, seq = number(flat[i + 1])
      if ms > last_ms or ms == last_ms and seq > last_seq then
        last_ms, last_seq = ms, seq
        from = '(' .. flat[i + 1]
      end
    end
  end
end
local ids = {}
for i, entry in ipairs(redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[1])) do
  ids[i] = entry[1]
end
if #ids == 0 then
  return 0
end
return redis.call('XDEL', KEYS[1], unpack(ids))
