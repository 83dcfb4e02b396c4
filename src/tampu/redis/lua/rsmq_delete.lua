-- Deletes messages of an RSMQ queue.
--
-- KEYS  1 hash of the queue, 2 sorted set of the queue
-- ARGV  ids
--
-- Reply one character for each id: 1 deleted, 0 there was none. A message counts if it was in the sorted set and had a
-- body, as JavaScript counts; what there was of it is gone in either case.

local answers = {}
for number, id in ipairs(ARGV) do
  local listed = redis.call('ZREM', KEYS[2], id)
  local fields = redis.call('HDEL', KEYS[1], id, id .. ':rc', id .. ':fr')
  answers[number] = listed == 1 and fields > 0 and '1' or '0'
end
return table.concat(answers)
