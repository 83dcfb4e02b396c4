-- Hands back entries that were read but not started.
--
-- A new entry moves to the tail of the stream, after the backlog: XADD wakes a blocked reader, and an entry that merely
-- becomes claimable does not. One that was deleted in the meantime is only removed from the pending list.
--
-- An entry that was taken over may have killed its workers, so its deaths must still be counted: it stays pending with
-- the deliveries it had before this one, and with an expired lease, so that the next takeover finds it.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 '1' if the server supports XACKDEL, 4 maximum number of deliveries (0: any): an entry that
--       was delivered more often has been taken over since and is running, 5 the number that marks a start, 6 idle time
--       in ms at which a lease has expired, then entry ids
-- Reply number of entries handed back

--@include lib/ack_and_delete.lua

local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local given, most, mark, idle_ms = 0, tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
for i = 7, #ARGV do
  local id = ARGV[i]
  local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
  if pending and (most == 0 or pending[4] <= most) then
    local entry = redis.call('XRANGE', stream, id, id)[1]
    local earlier = pending[4] % mark - 1
    if entry and earlier > 0 then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', idle_ms, 'RETRYCOUNT', earlier, 'JUSTID')
    else
      if entry then
        redis.call('XADD', stream, '*', unpack(entry[2]))
      end
      ack_and_delete(stream, group, {id}, ARGV[3] == '1')
    end
    given = given + (entry and 1 or 0)
  end
end
return given
