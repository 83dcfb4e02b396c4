-- Reads the attributes of an RSMQ queue, after changing those that are given.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue
-- ARGV  1 precision of scores: ms or us   then field, value, ... to change
--
-- Reply nil: no such queue
--       {vt, delay, maxsize, totalrecv, totalsent, created, modified, messages, hidden, visible}
--
-- `hidden` counts as JavaScript does, from the start of the current second: it includes messages that became visible
-- within this second. `visible` is exact: the messages that a receive finds now.

local hash, zset, micro = KEYS[1], KEYS[2], ARGV[1] == 'us'
local time = redis.call('TIME')
local seconds, us = time[1], tonumber(time[2])

if #ARGV > 1 then
  local queue = redis.call('HMGET', hash, 'vt', 'delay', 'maxsize')
  if not (queue[1] and queue[2] and queue[3]) then
    return false
  end
  redis.call('HSET', hash, 'modified', seconds, unpack(ARGV, 2))
end

local reply = redis.call('HMGET', hash, 'vt', 'delay', 'maxsize', 'totalrecv', 'totalsent', 'created', 'modified')
if not reply[1] then
  return false
end
local now, hidden_from
if micro then
  now = string.format('%.0f', tonumber(seconds) * 1000000 + us)
  hidden_from = now
else
  now = string.format('%.0f', tonumber(seconds) * 1000 + math.floor(us / 1000))
  hidden_from = seconds .. '000'
end
reply[8] = redis.call('ZCARD', zset)
reply[9] = redis.call('ZCOUNT', zset, hidden_from, '+inf')
reply[10] = redis.call('ZCOUNT', zset, '-inf', now)
return reply
