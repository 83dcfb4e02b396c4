-- Puts messages into an RSMQ queue: the look-up of the queue, the ids and all writes in one step.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue, 3 (optional) marker of this sender
-- ARGV  1 precision of scores: ms or us   2 score units in one unit of delay   3 channel to notify, or ''
--       4 delay, or '' for the queue's own    5 size of the largest message    6 slot in the marker   7 its TTL, ms
--       then for each message the random part of its id, and its body
--
-- Reply nil: no such queue.   1: a message is too long.   2: the queue's own delay is out of range.
--       {delay of the queue if it was used, or '', id, ...}; in the first three cases nothing was written
--
-- With a marker a call that is repeated because its reply was lost writes nothing and gives the ids of the first run.

local hash, zset, marker = KEYS[1], KEYS[2], KEYS[3]
local micro, step = ARGV[1] == 'us', tonumber(ARGV[2])
local FIRST = 8

if marker then
  local earlier = redis.call('HGET', marker, ARGV[6])
  if earlier and string.find(earlier, ARGV[FIRST] .. ' ', 1, true) == 1 then
    local reply = {''}
    for id in string.gmatch(string.sub(earlier, #ARGV[FIRST] + 2), '%S+') do
      reply[#reply + 1] = id
    end
    return reply
  end
end

local queue = redis.call('HMGET', hash, 'vt', 'delay', 'maxsize')
if not (queue[1] and queue[2] and queue[3]) then
  return false
end
local own_delay = ARGV[4] == ''
local delay = math.floor(tonumber(own_delay and queue[2] or ARGV[4]) or -1) * step
if delay < 0 or delay > 9999999 * (micro and 1000000 or 1000) then
  return 2
end
local maxsize = tonumber(queue[3]) or -1
if maxsize ~= -1 and tonumber(ARGV[5]) > maxsize then
  return 1
end

local DIGITS = '0123456789abcdefghijklmnopqrstuvwxyz'
local function base36(number, width)
  local text = ''
  while number > 0 or #text < width do
    local digit = number % 36
    text = string.sub(DIGITS, digit + 1, digit + 1) .. text
    number = (number - digit) / 36
  end
  return text
end

local time = redis.call('TIME')
local us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local score = string.format('%.0f', (micro and us or math.floor(us / 1000)) + delay)

-- Messages of one call get ids one microsecond apart: equal scores are ordered by id, and they keep their order.
local LOW = 46656  -- 36 ^ 3: the last digits change with each message, the others hardly ever
local high, high_text
local scores, bodies, reply = {}, {}, {own_delay and queue[2] or ''}
for argument = FIRST, #ARGV, 2 do
  local low = us % LOW
  if us - low ~= high then
    high = us - low
    high_text = base36(high / LOW, 0)
  end
  local id = high_text .. base36(low, 3) .. ARGV[argument]
  local at = #scores
  scores[at + 1], scores[at + 2] = score, id
  bodies[at + 1], bodies[at + 2] = id, ARGV[argument + 1]
  reply[#reply + 1] = id
  us = us + 1
end

local count = #reply - 1
local before = ARGV[3] ~= '' and redis.call('ZCARD', zset)
redis.call('ZADD', zset, unpack(scores))
redis.call('HSET', hash, unpack(bodies))
-- The messages are in. From here on nothing may make the sender think otherwise: not a counter that somebody made
-- unreadable, not a channel that an ACL forbids.
redis.pcall('HINCRBY', hash, 'totalsent', count)
if before then
  -- One notification for each message, as if each had been sent alone: a listener may receive once for each it hears.
  for number = 1, count do
    redis.pcall('PUBLISH', ARGV[3], before + number)
  end
end
if marker then
  redis.pcall('HSET', marker, ARGV[6], ARGV[FIRST] .. ' ' .. table.concat(reply, ' ', 2))
  redis.pcall('PEXPIRE', marker, ARGV[7])
end
return reply
