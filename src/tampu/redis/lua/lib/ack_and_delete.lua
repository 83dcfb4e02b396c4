-- Acknowledges and deletes entries; returns how many were acknowledged, or XACKDEL's own reply. A server that turns out
-- not to have XACKDEL gets the two commands it stands for: nothing may be raised here, behind the other writes.
local function ack_and_delete(stream, group, ids, has_xackdel)
  if has_xackdel then
    local reply = redis.pcall('XACKDEL', stream, group, 'IDS', #ids, unpack(ids))
    if not reply.err then
      return reply
    end
  end
  local acked = redis.call('XACK', stream, group, unpack(ids))
  redis.call('XDEL', stream, unpack(ids))
  return acked
end
