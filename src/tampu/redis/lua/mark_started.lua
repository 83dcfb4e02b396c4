-- Marks entries whose last attempt starts: adds a number to their delivery count that deliveries alone never reach. If
-- the worker dies, the next owner can distinguish a job that had started from one that was only waiting in the same
-- worker. The mark is part of the pending entry, so it needs no cleanup, and XCLAIM works at maxmemory.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 the number that marks a start (0: only check ownership), then entry ids
-- Reply the ids that the consumer no longer owns: their jobs must not start

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
