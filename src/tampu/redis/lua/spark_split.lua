-- Returns where a step over a stream ends, without returning the entries: this splits Spark's partitions.
--
-- KEYS  1 stream
-- ARGV  1 first id, 2 last id, 3 maximum number of entries (1,000: about 1 ms)
-- Reply {entries, id of the last of them}; {0, ''} if there are none

local entries = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
if #entries == 0 then
  return {0, ''}
end
return {#entries, entries[#entries][1]}
