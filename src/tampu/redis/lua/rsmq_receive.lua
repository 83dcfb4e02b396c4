-- Receives due messages of an RSMQ queue: hides them for vt, or removes them (pop).
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue
-- ARGV  none for a plain receive: one message, hidden for the queue's vt in seconds, scores in ms; or
--       1 precision of scores: ms or us   2 score units in one unit of vt   3 vt, '' for the queue's vt, or 'pop'
--       4 maximum number of messages
--
-- Reply nil: no such queue.   2: the queue's vt is out of range.
--       {vt of the queue if it was used, or '', id, body, receive count, first received, ...}
--       {vt or '', wait}: nothing is due; score units until the next message is, -1: the queue is empty, 0: ask again
--
-- Members without a body, left behind by another client's incomplete write, are removed: they are not messages, and at
-- the head of the queue they would be received forever.
-- The script is written for speed: it takes most of the time of a receive, and each redis.call counts.

local MOST_BYTES = 262144   -- maximum bytes of bodies in a reply, unless the first message is larger
local MOST_PHANTOMS = 1000  -- maximum members without a body removed per call
local SOME = 32             -- bodies read at a time: they may be large and fill the reply early

local hash, zset, call = KEYS[1], KEYS[2], redis.call
local queue = call('HMGET', hash, 'vt', 'delay', 'maxsize', 'totalrecv')
if not (queue[1] and queue[2] and queue[3]) then
  return false
end

local micro, step, vt, most, second = false, 1000, queue[1], 1, 1000
local own_vt, pop = queue[1], false
if ARGV[1] then
  micro, step, most = ARGV[1] == 'us', tonumber(ARGV[2]), tonumber(ARGV[4])
  second = micro and 1000000 or 1000
  if ARGV[3] ~= '' then
    vt, own_vt, pop = ARGV[3], '', ARGV[3] == 'pop'
  end
end
vt = pop and 0 or math.floor(tonumber(vt) or -1) * step
if vt < 0 or vt > 9999999 * second then
  return 2
end

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
if not micro then
  now = (now - now % 1000) / 1000
end
local now_text = string.format('%.0f', now)
local hidden_until = string.format('%.0f', now + vt)

local reply, scores, counts = {own_vt}, {}, {}
local taken, bytes, phantoms = 0, 0, 0
repeat
  -- All ids at once: with vt = 0 received messages are still due, and a second query would return them again.
  local ids = call('ZRANGEBYSCORE', zset, '-inf', now_text, 'LIMIT', 0, most)
  local from, full = 1, false
  while from <= #ids and not full do
    local last = math.min(from + SOME - 1, #ids)
    local fields = {}
    for number = from, last do
      local at, id = #fields, ids[number]
      fields[at + 1], fields[at + 2], fields[at + 3] = id, id .. ':rc', id .. ':fr'
    end
    local stored = call('HMGET', hash, unpack(fields))
    for at = 1, #fields, 3 do
      local id, body = fields[at], stored[at]
      if body then
        bytes = bytes + #body
        if taken > 0 and bytes > MOST_BYTES then
          full = true
          break
        end
        local count = (tonumber(stored[at + 1]) or 0) + 1
        local top = #reply
        reply[top + 1], reply[top + 2], reply[top + 3] = id, body, count
        reply[top + 4] = count > 1 and stored[at + 2] or now_text
        scores[2 * taken + 1], scores[2 * taken + 2] = hidden_until, id
        top = #counts
        counts[top + 1], counts[top + 2] = fields[at + 1], count
        if count == 1 then
          counts[top + 3], counts[top + 4] = fields[at + 2], now_text
        end
        taken = taken + 1
      else
        call('ZREM', zset, id)
        call('HDEL', hash, fields[at + 1], fields[at + 2])
        phantoms = phantoms + 1
      end
    end
    from = last + 1
  end
until taken > 0 or #ids == 0 or phantoms >= MOST_PHANTOMS

if taken == 0 then
  local head = call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  reply[2] = head[2] and math.max(math.ceil(head[2] - now), 0) or -1
  return reply
end

local received = tonumber(queue[4] or 0)
if received then  -- a counter that is not a number stays as it is
  local top = pop and 0 or #counts
  counts[top + 1], counts[top + 2] = 'totalrecv', received + taken
end
if pop then
  local members, gone = {}, {}
  for number = 1, taken do
    local id = scores[2 * number]
    members[number] = id
    gone[3 * number - 2], gone[3 * number - 1], gone[3 * number] = id, id .. ':rc', id .. ':fr'
  end
  call('ZREM', zset, unpack(members))
  call('HDEL', hash, unpack(gone))
  if received then
    call('HSET', hash, counts[1], counts[2])
  end
  return reply
end
-- At maxmemory a server refuses a script's first write if it may need memory, but no write after one that never does,
-- such as this ZREM, which removes nothing. Without it a full server could not be drained.
local done = redis.pcall('ZADD', zset, unpack(scores))
if type(done) == 'table' and done.err then
  call('ZREM', zset, '')
  call('ZADD', zset, unpack(scores))
end
call('HSET', hash, unpack(counts))
return reply
