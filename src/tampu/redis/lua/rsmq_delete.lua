-- Deletes messages of an RSMQ queue.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue
-- ARGV  ids
--
-- Reply one character per id: 1 deleted, 0 no such message. As in JavaScript, a message exists if it is in the sorted
-- set and has a body; whatever exists of it is deleted in either case.

local hash, zset = KEYS[1], KEYS[2]
if #ARGV == 1 then
  local id = ARGV[1]
  local listed = redis.call('ZREM', zset, id)
  local fields = redis.call('HDEL', hash, id, id .. ':rc', id .. ':fr')
  return listed == 1 and fields > 0 and '1' or '0'
end

local counters, fields = {}, {}
for number, id in ipairs(ARGV) do
  counters[number] = id .. ':rc'
  fields[3 * number - 2], fields[3 * number - 1], fields[3 * number] = id, id .. ':rc', id .. ':fr'
end
local listed, received = redis.call('ZMSCORE', zset, unpack(ARGV)), redis.call('HMGET', hash, unpack(counters))
local answers, seen = {}, {}
for number, id in ipairs(ARGV) do
  -- A received message has a counter. For the others HEXISTS avoids reading a body, which may be large.
  local there = listed[number] and not seen[id] and (received[number] or redis.call('HEXISTS', hash, id) == 1)
  answers[number] = there and '1' or '0'
  seen[id] = true
end
redis.call('ZREM', zset, unpack(ARGV))
redis.call('HDEL', hash, unpack(fields))
return table.concat(answers)
