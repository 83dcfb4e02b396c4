-- Takes messages that are due out of an RSMQ queue: hides them for a while, or removes them (pop).
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue
-- ARGV  1 precision of scores: ms or us   2 score units in one unit of vt   3 vt, '' for the queue's own, or 'pop'
--       4 most messages
--
-- Reply nil: no such queue.   2: the queue's own vt is out of range.
--       {vt of the queue if it was used, or '', id, body, receive count, first received, ...}
--       {that, wait}: nothing is due; so many score units until something is, -1 when the queue is empty
--
-- Members without a body, which a half-done write of somebody leaves behind, are removed: they are no messages, and at
-- the head of the queue they would be taken for ever.

local hash, zset = KEYS[1], KEYS[2]
local micro, pop, most = ARGV[1] == 'us', ARGV[3] == 'pop', tonumber(ARGV[4])
local MOST_BYTES = 262144   -- one reply holds no more than this, or one message
local MOST_PHANTOMS = 1000  -- removed in one call

local queue = redis.call('HMGET', hash, 'vt', 'delay', 'maxsize')
if not (queue[1] and queue[2] and queue[3]) then
  return false
end
local vt, own_vt = 0, ARGV[3] == ''
if not pop then
  vt = math.floor(tonumber(own_vt and queue[1] or ARGV[3]) or -1) * tonumber(ARGV[2])
  if vt < 0 or vt > 9999999 * (micro and 1000000 or 1000) then
    return 2
  end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if not micro then
  now = math.floor(now / 1000)
end
local now_text, hidden_until = string.format('%.0f', now), string.format('%.0f', now + vt)

-- At its maxmemory a server refuses a script's first write if that may take memory, but not this one, which removes
-- nothing, and none of those behind it: a full server must let its queues be drained.
redis.call('ZREM', zset, '')

local reply, taken, bytes, phantoms = {own_vt and queue[1] or ''}, 0, 0, 0
repeat
  -- All ids at once: with vt = 0 what was taken is due again, and a second look would find it a second time.
  local ids = redis.call('ZRANGEBYSCORE', zset, '-inf', now_text, 'LIMIT', 0, most)
  for _, id in ipairs(ids) do
    local body = redis.call('HGET', hash, id)
    if not body then
      redis.call('ZREM', zset, id)
      redis.call('HDEL', hash, id .. ':rc', id .. ':fr')
      phantoms = phantoms + 1
    else
      bytes = bytes + #body
      if taken > 0 and bytes > MOST_BYTES then
        break
      end
      -- First what decides who has the message. A counter that somebody made unreadable must not stop us half way.
      if pop then
        redis.call('ZREM', zset, id)
      else
        redis.call('ZADD', zset, hidden_until, id)
      end
      local count = redis.pcall('HINCRBY', hash, id .. ':rc', 1)
      local first = now_text
      if type(count) ~= 'number' then
        count = 1
      end
      if count > 1 then
        first = redis.call('HGET', hash, id .. ':fr') or now_text
      elseif not pop then
        redis.call('HSET', hash, id .. ':fr', now_text)
      end
      if pop then
        redis.call('HDEL', hash, id, id .. ':rc', id .. ':fr')
      end
      local at = #reply
      reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = id, body, count, first
      taken = taken + 1
    end
  end
until taken > 0 or #ids == 0 or phantoms >= MOST_PHANTOMS

if taken > 0 then
  redis.pcall('HINCRBY', hash, 'totalrecv', taken)
else
  local head = redis.call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  reply[2] = head[2] and math.max(math.ceil(tonumber(head[2]) - now), 0) or -1
end
return reply
