-- A stall is a time in which no worker's renewal got through: the server was stopped, busy or refused writes, or its
-- clock was set forward. Then every lease looks old, and live workers must renew theirs before any is taken over.
--
-- The last renewal is kept as the TTL of `alive`, a key that lives for a day: PEXPIRE works at maxmemory, SET does not.
-- Each stall sets `grace` once and is then forgotten, so that a fleet without renewals is still taken over. An ACL that
-- does not allow these commands costs the grace, not the renewal.
local ALIVE_MS = 86400000
local function note_stall(alive, grace, stall_ms, grace_ms)
  local left = redis.pcall('PTTL', alive)
  if type(left) ~= 'number' or left < 0 or ALIVE_MS - left <= tonumber(stall_ms) then
    return false
  end
  redis.pcall('SET', grace, '1', 'NX', 'PX', grace_ms)
  redis.pcall('PEXPIRE', alive, ALIVE_MS)
  return true
end
