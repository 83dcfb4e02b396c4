-- Acknowledges and deletes entries; returns how many were acknowledged, or the reply of XACKDEL. Falls back to XACK and
-- XDEL if the server does not support XACKDEL after all: an error here would come after the caller's other writes.
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
