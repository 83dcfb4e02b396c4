-- Fires a repeatable job: its jobs are written, its counter and its next fire with them.
--
-- KEYS  1 stream, 2 delayed set, 3 zset of next fires, 4 hash of the spec
-- ARGV  1 score that was read, 2 next fire in ms ('' = none), 3 cap of the stream, 4 spec key, 5 limit (0 = none),
--       6 the spec that was read, 7 number of fires, then per fire: name, envelope
-- Reply {fired, 1 when the spec was removed}; {-1, 0} when somebody else fired, changed or removed it meanwhile

local stream, delayed, repeats, hash = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('ZSCORE', repeats, ARGV[4]) ~= ARGV[1] or redis.call('HGET', hash, 'spec') ~= ARGV[6] then
  return {-1, 0}
end
local limit = tonumber(ARGV[5])
local count = tonumber(redis.call('HGET', hash, 'fired') or 0)
local room = tonumber(ARGV[3]) - redis.call('XLEN', stream)
local fired = 0
local time
for i = 8, 7 + 2 * tonumber(ARGV[7]), 2 do
  if limit > 0 and count >= limit then
    break
  end
  local name, envelope = ARGV[i], ARGV[i + 1]
  if fired < room then
    if name == '' then
      redis.call('XADD', stream, '*', 'd', envelope)
    else
      redis.call('XADD', stream, '*', 'd', envelope, 'n', name)
    end
  else
    -- No room in the stream: the promoter brings it in when there is.
    time = time or redis.call('TIME')
    redis.call('ZADD', delayed, time[1] .. '000', struct.pack('<I4', #name) .. name .. envelope)
  end
  count = count + 1
  fired = fired + 1
end
if ARGV[2] == '' or limit > 0 and count >= limit then
  redis.call('ZREM', repeats, ARGV[4])
  redis.call('DEL', hash)
  return {fired, 1}
end
if fired > 0 then
  redis.call('HINCRBY', hash, 'fired', fired)
end
redis.call('ZADD', repeats, ARGV[2], ARGV[4])
return {fired, 0}
