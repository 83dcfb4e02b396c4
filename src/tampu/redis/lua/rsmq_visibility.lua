-- Sets when a message of an RSMQ queue may be received next.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue
-- ARGV  1 precision of scores: ms or us   2 score units in one unit of vt   3 vt   4 id
--
-- Reply nil: no such queue.   1: done.   0: no such message.

local queue = redis.call('HMGET', KEYS[1], 'vt', 'delay', 'maxsize')
if not (queue[1] and queue[2] and queue[3]) then
  return false
end
if not redis.call('ZSCORE', KEYS[2], ARGV[4]) then
  return 0
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if ARGV[1] ~= 'us' then
  now = math.floor(now / 1000)
end
redis.call('ZREM', KEYS[2], '')  -- removes nothing, but makes a server at maxmemory accept the next write
redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[3]) * tonumber(ARGV[2])), ARGV[4])
return 1
