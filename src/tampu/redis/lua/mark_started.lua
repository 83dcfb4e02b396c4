-- Marks entries whose last attempt begins: their delivery count becomes a number that deliveries alone never reach. If
-- the worker dies, the next owner can tell a job that had begun from one that only waited beside it. The mark goes with
-- the pending entry, so nothing has to be cleaned up, and XCLAIM works at maxmemory.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 the number that marks a start; 0: only look who owns the entries; then entry ids
-- Reply the ids that are no longer ours: their jobs must not begin

local stream, group, consumer, mark = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local lost = {}
for i = 4, #ARGV do
  local pending = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1, consumer)[1]
  if not pending then
    lost[#lost + 1] = ARGV[i]
  elseif pending[4] < mark then
    redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'RETRYCOUNT', pending[4] + mark, 'JUSTID')
  end
end
return lost
