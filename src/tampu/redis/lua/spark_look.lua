-- Samples both ends of a range of a stream, without returning entries: Spark's partitions are estimated from the
-- density of the entries there.
--
-- KEYS  1 stream
-- ARGV  1 first id, 2 last id, 3 entries to sample at each end
-- Reply {entries} if there are no more than that; otherwise {first id, last id, and for each end: entries, the
--       milliseconds that they span}
--
-- The last millisecond of a sample is incomplete and left out. If a sample does not get beyond its first millisecond,
-- the count comes from the sequence numbers, which the server assigns one by one.

local most = tonumber(ARGV[3])

local function halves(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return ms, tonumber(ms), tonumber(seq)
end

local function before_the_last_ms(entries, last_ms)
  local lead = last_ms .. '-'
  for place = #entries, 1, -1 do
    if string.sub(entries[place][1], 1, #lead) ~= lead then
      return place
    end
  end
end

local head = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', most + 1)
if #head <= most then
  return {#head}
end
local tail = redis.call('XREVRANGE', KEYS[1], ARGV[2], ARGV[1], 'COUNT', most + 1)

local first, last = head[1][1], tail[1][1]

local first_text, first_ms, first_seq = halves(first)
local text, ms = halves(head[#head][1])
local head_count, head_width = before_the_last_ms(head, text), ms - first_ms
if text == first_text then
  local _, _, last_seq = halves(redis.call('XREVRANGE', KEYS[1], text, text, 'COUNT', 1)[1][1])
  head_count, head_width = last_seq - first_seq + 1, 1
end

local last_text, last_ms, last_seq = halves(last)
text, ms = halves(tail[#tail][1])
local tail_count, tail_width = before_the_last_ms(tail, text), last_ms - ms
if text == last_text then
  tail_count, tail_width = last_seq + 1, 1
end

return {first, last, head_count, head_width, tail_count, tail_width}
