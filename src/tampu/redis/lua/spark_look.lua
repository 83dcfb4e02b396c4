-- Looks at both ends of a part of a stream, without sending entries: from how close they lie there Spark's partitions
-- are estimated.
--
-- KEYS  1 stream
-- ARGV  1 first id, 2 last id, 3 entries to look at on each side
-- Reply {entries} when there are no more than that; otherwise {entries seen from the first on, first id, id of the last
--       one seen, entries seen back from the last, id of the last one seen, last id}
--
-- Ids that the server gave out count the entries of one millisecond: where a look does not get beyond that, the
-- sequence numbers tell how many there are.

local most = tonumber(ARGV[3])

local function halves(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return ms, tonumber(seq)
end

local head = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', most + 1)
if #head <= most then
  return {#head}
end
local tail = redis.call('XREVRANGE', KEYS[1], ARGV[2], ARGV[1], 'COUNT', most)

local head_first, head_last = head[1][1], head[most][1]
local head_count = most
local ms, seq = halves(head_first)
if ms == halves(head_last) then
  local last_of_ms = redis.call('XREVRANGE', KEYS[1], ms, ms, 'COUNT', 1)[1][1]
  local _, last_seq = halves(last_of_ms)
  head_count = last_seq - seq + 1
end

local tail_first, tail_last = tail[most][1], tail[1][1]
local tail_count = most
ms, seq = halves(tail_last)
if ms == halves(tail_first) then
  tail_count = seq + 1
end

return {head_count, head_first, head_last, tail_count, tail_first, tail_last}
