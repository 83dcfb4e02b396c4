-- Detects a stall: a period without any renewal, because the server was stopped, busy or refused writes, or its clock
-- was set forward. After a stall every lease looks expired, so live workers must renew theirs before any is reclaimed.
--
-- The TTL of `alive`, a key that expires after a day, records the last renewal: PEXPIRE works at maxmemory, SET does
-- not. Each stall sets `grace` once and is then forgotten: the entries of a fleet that is really dead are reclaimed
-- after the grace. If an ACL forbids these commands, there is no grace, but renewals still work.
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
