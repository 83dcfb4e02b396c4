-- Hands back entries that were read but not started: moves each to the tail of the stream, after the backlog, and
-- removes it from the pending list. An entry that was deleted in the meantime is only removed. Entries are added again,
-- because XADD wakes a blocked reader and an entry that merely becomes claimable does not.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 '1' if the server supports XACKDEL, 4 maximum number of deliveries (0: any): an entry that
--       was delivered more often has been taken over since and is running; then per entry: id, new envelope ('' = unchanged)
-- Reply number of entries handed back

--@include lib/ack_and_delete.lua

local stream, group = KEYS[1], ARGV[1]
local given, most = 0, tonumber(ARGV[4])
for i = 5, #ARGV, 2 do
  local id = ARGV[i]
  local pending = redis.call('XPENDING', stream, group, id, id, 1, ARGV[2])[1]
  if pending and (most == 0 or pending[4] <= most) then
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if entry then
      local fields = entry[2]
      if ARGV[i + 1] ~= '' then
        for f = 1, #fields, 2 do
          if fields[f] == 'd' then
            fields[f + 1] = ARGV[i + 1]
            break
          end
        end
      end
      redis.call('XADD', stream, '*', unpack(fields))
      given = given + 1
    end
    ack_and_delete(stream, group, {id}, ARGV[3] == '1')
  end
end
return given
