-- Reclaims entries whose leases have expired, and removes pending ids whose entries no longer exist. Does nothing in
-- the grace after a stall, or if it is executed too late (ARGV 5): then the leases of live workers look expired, too.
-- If the leases of two workers differ, as while a setting is rolled out, the longer one counts.
--
-- A reclaimed entry may have killed its worker, so not all of them may run together. The number of earlier deliveries
-- (deaths) is the class of an entry: 1, 2, or 3 for more. One call takes entries of one class and of one dead consumer,
-- and for a while no other worker takes entries of that consumer: if one of them kills again, it kills only one worker.
--
-- KEYS  1 stream, 2 alive, 3 grace, 4 takeovers: per dead consumer the worker that takes over, exclusively until when,
--       5 leases: per consumer their duration in ms
-- ARGV  1 group, 2 consumer, 3 ms without a renewal after which it is a stall, 4 grace after a stall in ms, 5 latest
--       server time in ms to run at, 6 minimum idle time in ms, 7 the number that marks a start, 8 for how many ms
--       one worker has a dead consumer exclusively, 9 class to take (0: that of the first entry), 10 to 12 maximum
--       number of entries of classes 1 to 3, then ids to skip (running in this worker)
-- Reply {now, entries, swept}: the server's time in ms; per entry {id, fields, earlier deliveries}; swept is the number
--       of pending ids without an entry

--@include lib/now_ms.lua
--@include lib/stall.lua

local stream, group, consumer, takeovers = KEYS[1], ARGV[1], ARGV[2], KEYS[4]
local now, idle_ms, mark, exclusive_ms = now_ms(), ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local class, most = tonumber(ARGV[9]), {tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])}
if note_stall(KEYS[2], KEYS[3], ARGV[3], ARGV[4]) or now > tonumber(ARGV[5])
  or redis.pcall('EXISTS', KEYS[3]) == 1 then
  return {now, {}, 0}
end

local ours = {}
for i = 13, #ARGV do
  ours[ARGV[i]] = true
end

-- Returns whether this worker may take over a dead consumer now. A claim expires after ten times the exclusive period.
local function may_take(dead)
  local claim = redis.pcall('HGET', takeovers, dead)
  local taker, ends = string.match(type(claim) == 'string' and claim or '', '^(.*) (%d+)$')
  if taker and now < tonumber(ends) + 9 * exclusive_ms then
    return taker == consumer or now >= tonumber(ends)
  end
  redis.pcall('HSET', takeovers, dead, consumer .. string.format(' %.0f', now + exclusive_ms))
  redis.pcall('PEXPIRE', takeovers, 10 * exclusive_ms)
  return true
end

local leases = {}
local function lease_of(owner)
  if not leases[owner] then
    local lease = redis.pcall('HGET', KEYS[5], owner)
    leases[owner] = math.max(tonumber(type(lease) == 'string' and lease) or 0, tonumber(idle_ms))
  end
  return leases[owner]
end

local function class_of(deliveries)
  return (deliveries >= mark or deliveries == 1) and 1 or deliveries == 2 and 2 or 3
end

local taken, swept, from = {}, 0, nil
for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', idle_ms, '-', '+', most[1] + #ARGV + 100)) do
  local id, dead, idle, deliveries = unpack(pending)
  local its_class = class_of(deliveries)
  if not ours[id] and idle >= lease_of(dead) and (class == 0 or its_class == class) and most[its_class] > 0
    and (dead == from or not from and may_take(dead)) then
    -- Pass the idle time again: if two workers ask at once, only one gets the entry.
    local claimed = redis.call('XCLAIM', stream, group, consumer, idle_ms, id)
    if claimed[1] and claimed[1][2] then
      taken[#taken + 1] = {id, claimed[1][2], deliveries}
      from, class = dead, its_class
      if #taken >= most[class] then
        break
      end
    elseif #redis.call('XRANGE', stream, id, id) == 0 then
      redis.call('XACK', stream, group, id)
      swept = swept + 1
    end
  end
end
return {now, taken, swept}
