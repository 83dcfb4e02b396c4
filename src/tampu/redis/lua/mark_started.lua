-- Marks an entry whose last attempt starts: adds a number to its delivery count that deliveries alone never reach. If
-- the worker dies, the next owner can distinguish a job that had started from one that was only waiting in the same
-- worker. The mark is part of the pending entry, so it needs no cleanup, and XCLAIM works at maxmemory.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 the number that marks a start, 4 entry id
-- Reply 1 marked, 0 it is marked already, or the consumer no longer owns it

local stream, group, consumer, mark, id = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
if not pending or pending[4] >= mark then
  return 0
end
redis.call('XCLAIM', stream, group, consumer, 0, id, 'RETRYCOUNT', pending[4] + mark, 'JUSTID')
return 1
