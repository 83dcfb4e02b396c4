-- Adds a delayed job with an explicit ID, or replaces it: the last arguments win. A trigger that finds the job running, or
-- ended, makes a new one, so that none is lost.
--
-- KEYS  1 delayed set, 2 didx, 3 dlid, 4 cancel mark, 5 result, 6 wake stream, 7 due times
-- ARGV  1 'd' (debounce) or 't' (throttle), 2 d: ms after the last trigger, t: ms between two jobs, 3 d: most ms after the
--       first trigger, 4 member of the delayed set, 5 job id, 6 TTL of the markers beyond the due time in seconds
-- Reply 1 if a delayed job was replaced, else 0
--
-- The marker `dlid` holds the time (ms) of the first trigger (d), or when the last job was due (t).

--@include lib/due_time.lua
--@include lib/announce.lua
--@include lib/now_ms.lua

local delayed, didx, dlid, mark, result, wake, due_times = unpack(KEYS)
local kind, pause, most, member, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], now_ms()
local old, marker = redis.call('GET', didx), tonumber(redis.call('GET', dlid) or '')
local old_due = old and tonumber(redis.call('ZSCORE', delayed, old))
local due, value
if kind == 'd' then
  value = old_due and marker or now
  due = math.max(now, math.min(now + pause, value + most))
else
  due = old_due or math.max(now, (marker or 0) + pause)
  value = due
end
if old_due then
  redis.call('ZREM', delayed, old)
end
redis.call('ZADD', delayed, string.format('%.0f', due), member)
local ttl = math.ceil((due - now + pause) / 1000) + ARGV[6]
redis.call('SET', didx, member, 'EX', ttl)
redis.call('SET', dlid, string.format('%.0f', value), 'EX', ttl)
redis.call('DEL', mark, result)
note_delayed(due, false)
announce(delayed, wake, due_times, now)
return old_due and 1 or 0
