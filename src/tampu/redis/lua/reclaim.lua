-- Takes over entries whose leases have run out, and sweeps pending ids whose entries are gone. Does nothing in the
-- grace after a stall, nor when it is executed later than it was meant to be: then the leases of live workers look old.
--
-- What is taken over may have killed its worker, so not everything may run together. The deaths of an entry, its earlier
-- deliveries, decide its class: 1 after the first, 2 after the second, 3 after more. One call takes entries of one class
-- and of one dead consumer, and for a while no other worker takes that consumer's: should one of them kill again, it
-- kills one worker.
--
-- KEYS  1 stream, 2 alive, 3 grace, 4 takeovers: per dead consumer who takes over, and until when that is its alone
-- ARGV  1 group, 2 consumer, 3 ms without a renewal that are a stall, 4 grace after one in ms, 5 not after this server
--       time in ms, 6 least idle time in ms, 7 the number that marks a start, 8 for how long a dead consumer is one
--       worker's alone in ms, 9 class to take (0: that of the first entry), 10 to 12 most entries of classes 1 to 3,
--       then ids to leave alone (running here)
-- Reply {now, entries, swept}: the server's time in ms; per entry {id, fields, earlier deliveries}; swept is how many
--       pending ids had no entry

--@include lib/now_ms.lua
--@include lib/stall.lua

local stream, group, consumer, takeovers = KEYS[1], ARGV[1], ARGV[2], KEYS[4]
local now, idle_ms, mark, alone_ms = now_ms(), ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local class, most = tonumber(ARGV[9]), {tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])}
if note_stall(KEYS[2], KEYS[3], ARGV[3], ARGV[4]) or now > tonumber(ARGV[5])
  or redis.pcall('EXISTS', KEYS[3]) == 1 then
  return {now, {}, 0}
end

local ours = {}
for i = 13, #ARGV do
  ours[ARGV[i]] = true
end

-- Whether this worker may take over from a dead consumer now. Its claim is forgotten after ten times as long.
local function may_take(dead)
  local claim = redis.pcall('HGET', takeovers, dead)
  local who, ends = string.match(type(claim) == 'string' and claim or '', '^(.*) (%d+)$')
  if who and now < tonumber(ends) + 9 * alone_ms then
    return who == consumer or now >= tonumber(ends)
  end
  redis.pcall('HSET', takeovers, dead, consumer .. string.format(' %.0f', now + alone_ms))
  redis.pcall('PEXPIRE', takeovers, 10 * alone_ms)
  return true
end

local function class_of(deliveries)
  return (deliveries >= mark or deliveries == 1) and 1 or deliveries == 2 and 2 or 3
end

local taken, swept, from = {}, 0, nil
for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', idle_ms, '-', '+', most[1] + #ARGV + 100)) do
  local id, dead, deliveries = pending[1], pending[2], pending[4]
  local its_class = class_of(deliveries)
  if not ours[id] and (class == 0 or its_class == class) and most[its_class] > 0
    and (dead == from or not from and may_take(dead)) then
    -- The same idle time again: between two workers asking at once only one gets it.
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
