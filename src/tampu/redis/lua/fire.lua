-- Fires a repeatable job: writes its next fire, its counter and its jobs atomically.
--
-- KEYS  1 stream, 2 delayed set, 3 zset of next fires, 4 hash of the spec, 5 wake stream
-- ARGV  1 score that was read, 2 next fire in ms ('' = none), 3 maximum length of the stream, 4 spec key,
--       5 limit (0 = none), 6 the spec that was read, 7 job name, then per fire: its time in ms, envelope
-- Reply {fired, 1 if the spec was removed, error}; {-1, 0, ''} if it was fired, changed or removed since it was read.
--       With an error ('' = none) the first fire that could not be written, and all after it, are due again.

--@include lib/due_time.lua
--@include lib/announce.lua
--@include lib/append_entry.lua
--@include lib/delayed_member.lua
--@include lib/now_ms.lua

local stream, delayed, repeats, hash = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local next_fire, spec_key, limit, name = ARGV[2], ARGV[4], tonumber(ARGV[5]), ARGV[7]
if redis.call('ZSCORE', repeats, spec_key) ~= ARGV[1] or redis.call('HGET', hash, 'spec') ~= ARGV[6] then
  return {-1, 0, ''}
end
local before = tonumber(redis.call('HGET', hash, 'fired') or 0) or 0
local room = tonumber(ARGV[3]) - redis.call('XLEN', stream)
local fires = (#ARGV - 7) / 2
if limit > 0 then
  fires = math.max(math.min(fires, limit - before), 0)
end

local function book(score, fired)
  if fires > 0 then
    redis.call('HSET', hash, 'fired', string.format('%.0f', fired))
  end
  redis.call('ZADD', repeats, score, spec_key)
end
-- Counter and next fire are written before the jobs: if they failed afterwards, each retry would fire the jobs again.
-- First of all rewrite the current score, which changes nothing but fails if writing the next one would.
redis.call('ZADD', repeats, ARGV[1], spec_key)
book(next_fire ~= '' and next_fire or ARGV[1], before + fires)

for i = 1, fires do
  local envelope = ARGV[7 + 2 * i]
  local reply
  if i > room then
    -- The stream is full: the promoter moves the job into it later.
    local now = now_ms()
    reply = redis.pcall('ZADD', delayed, string.format('%.0f', now), delayed_member(name, envelope))
    note_delayed(now)
  else
    reply = append_entry(redis.pcall, stream, envelope, name)
  end
  if type(reply) == 'table' and reply.err then
    book(ARGV[6 + 2 * i], before + i - 1)
    return {i - 1, 0, reply.err}
  end
end
announce(delayed, KEYS[5])
if next_fire == '' or limit > 0 and before + fires >= limit then
  redis.call('ZREM', repeats, spec_key)
  redis.call('DEL', hash)
  return {fires, 1, ''}
end
return {fires, 0, ''}
