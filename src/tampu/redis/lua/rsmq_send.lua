-- Sends messages to an RSMQ queue: looks up the queue, creates the ids and writes everything atomically.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue, 3 (optional) marker of this sender
-- ARGV  1 '' for a plain send: scores in ms, the queue's delay in seconds, sizes in bytes, no notification;
--         or 'with', followed by 2 precision of scores: ms or us   3 score units in one unit of delay
--         4 delay, or '' for the queue's delay   5 channel to notify, or ''   6 size of the largest message
--         7 slot in the marker   8 its TTL, ms
--       then for each message the random part of its id, and its body
--
-- Reply nil: no such queue.   1: a message is too long.   2: the queue's delay is out of range.
--       {delay of the queue if it was used, or '', id, ...}; in the first three cases nothing was written
--
-- With a marker, a call that is repeated because its reply was lost writes nothing and returns the ids of the first.
-- The script is written for speed: it takes most of the time of a send, and each redis.call counts.

local hash, zset, call = KEYS[1], KEYS[2], redis.call
local queue = call('HMGET', hash, 'vt', 'delay', 'maxsize', 'totalsent')
if not (queue[1] and queue[2] and queue[3]) then
  return false
end

local first, micro, step, second = 2, false, 1000, 1000
local delay, own_delay, channel, largest, marker = queue[2], queue[2], '', 0, nil
if ARGV[1] == 'with' then
  first, micro, step, channel, largest, marker = 9, ARGV[2] == 'us', tonumber(ARGV[3]), ARGV[5], tonumber(ARGV[6]), KEYS[3]
  second = micro and 1000000 or 1000
  if ARGV[4] ~= '' then
    delay, own_delay = ARGV[4], ''
  end
  local earlier = marker and call('HGET', marker, ARGV[7])
  if earlier and string.find(earlier, ARGV[first] .. ' ', 1, true) == 1 then
    local reply = {''}
    for id in string.gmatch(string.sub(earlier, #ARGV[first] + 2), '%S+') do
      reply[#reply + 1] = id
    end
    return reply
  end
else
  for argument = 3, #ARGV, 2 do
    largest = math.max(largest, #ARGV[argument])
  end
end
delay = math.floor(tonumber(delay) or -1) * step
if delay < 0 or delay > 9999999 * second then
  return 2
end
local maxsize = tonumber(queue[3]) or -1
if maxsize ~= -1 and largest > maxsize then
  return 1
end

local time = call('TIME')
local us = time[1] * 1000000 + time[2]
local score = string.format('%.0f', (micro and us or (us - us % 1000) / 1000) + delay)

-- Returns microseconds in base 36: ten digits from 1973 to 2085.
local function text_of(number)
  local codes = {}
  for place = 10, 1, -1 do
    local digit = number % 36
    codes[place] = digit < 10 and 48 + digit or 87 + digit
    number = (number - digit) / 36
  end
  return string.char(unpack(codes))
end

-- The ids of one call are one microsecond apart: equal scores are ordered by id, so messages keep their order.
local scores, bodies, reply = {}, {}, {own_delay}
for argument = first, #ARGV, 2 do
  local id = text_of(us) .. ARGV[argument]
  local at = argument - first
  scores[at + 1], scores[at + 2] = score, id
  bodies[at + 1], bodies[at + 2] = id, ARGV[argument + 1]
  reply[at / 2 + 2] = id
  us = us + 1
end
local count = #reply - 1
local sent = tonumber(queue[4] or 0)
if sent then  -- a counter that is not a number stays as it is
  bodies[2 * count + 1], bodies[2 * count + 2] = 'totalsent', sent + count
end

local before = channel ~= '' and call('ZCARD', zset)
call('ZADD', zset, unpack(scores))
call('HSET', hash, unpack(bodies))
-- The messages are stored. Nothing may raise from here on, such as a channel that an ACL forbids: the sender would
-- believe that nothing was sent.
if before then
  -- One notification per message, as if each had been sent alone: a listener may receive once per notification.
  for number = 1, count do
    redis.pcall('PUBLISH', channel, before + number)
  end
end
if marker then
  redis.pcall('HSET', marker, ARGV[7], ARGV[first] .. ' ' .. table.concat(reply, ' ', 2))
  redis.pcall('PEXPIRE', marker, ARGV[8])
end
return reply
