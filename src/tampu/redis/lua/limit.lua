-- Changes the limits of a queue. The calls of take.lua that follow apply them.
--
-- KEYS  1 limits
-- ARGV  pairs: field and limit, see lib/gate.lua; '' instead of a limit removes it. No pairs: remove all
-- Reply 1 if the queue has limits now, else 0

local limits, had = KEYS[1], redis.call('EXISTS', KEYS[1])
if #ARGV == 0 then
  redis.call('DEL', limits)
end
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then
    redis.call('HSET', limits, ARGV[i], ARGV[i + 1])
  else
    redis.call('HDEL', limits, ARGV[i])
  end
end
redis.call('HDEL', limits, '#', '!')
local count = redis.call('HLEN', limits)
if count == 0 then
  if had == 1 then
    redis.call('HSET', limits, '!', '1')  -- take.lua opens the group once nothing waits
  end
elseif count > redis.call('HEXISTS', limits, '') + redis.call('HEXISTS', limits, '*') then
  redis.call('HSET', limits, '#', '1')
end
return count > 0 and 1 or 0
