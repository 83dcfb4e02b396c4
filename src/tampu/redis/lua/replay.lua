-- Moves dead letters back into the stream. Each is added first and removed last: a failure in between repeats a job but
-- never loses one. Concurrent replays move each letter once.
--
-- KEYS  1 dlq, 2 stream, 3 counts of replays
-- ARGV  1 maximum length of the stream, 2 TTL of the counts in seconds, then per letter: its id, envelope, name, job id
-- Reply {moved, 1 if the stream was full}

--@include lib/append_entry.lua

local room = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[2])
local moved = 0
for i = 3, #ARGV, 4 do
  local id, envelope, name, job = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if #redis.call('XRANGE', KEYS[1], id, id) > 0 then
    if room <= moved then
      return {moved, 1}
    end
    append_entry(redis.call, KEYS[2], envelope, name)
    redis.call('XDEL', KEYS[1], id)
    redis.call('HINCRBY', KEYS[3], job, 1)
    moved = moved + 1
  end
end
if moved > 0 then
  redis.call('EXPIRE', KEYS[3], ARGV[2])
end
return {moved, 0}
