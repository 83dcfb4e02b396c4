-- Ends a transaction of plain XADDs: they count if this window is the next of its chain and the queue has room for all.
-- Otherwise they are deleted again: EXEC is one step, so no reader has seen them. add_window.lua describes the chain.
--
-- KEYS  1 state of the chain, 2 stream
-- ARGV  1 maximum length of the stream, 2 number of the window in its chain, 3 new TTL of the chain's state in seconds
--       (0: unchanged), then the ids of its jobs
-- Reply 1 if the window was applied, 0 if it was taken back: send it through add_plain_window.lua, which replies why

--@include lib/job_id.lua

local chain, stream, number = KEYS[1], KEYS[2], tonumber(ARGV[2])

-- Errors are caught: with one, the XADDs would stay without their window.
local last = redis.pcall('HGET', chain, 'last') or 0
if tonumber(last) == number - 1 and redis.call('XLEN', stream) <= tonumber(ARGV[1]) then
  if type(redis.pcall('HSET', chain, 'last', ARGV[2])) == 'number' then
    if ARGV[3] ~= '0' then
      redis.pcall('EXPIRE', chain, ARGV[3])
    end
    return 1
  end
end

-- The newest entries are those of this transaction. Their ids are compared nevertheless: never delete another job.
local ours = {}
for i = 4, #ARGV do
  ours[ARGV[i]] = true
end
for _, entry in ipairs(redis.call('XREVRANGE', stream, '+', '-', 'COUNT', #ARGV - 3)) do
  local id = job_id(entry[2][2])
  if id and ours[id] then
    redis.call('XDEL', stream, entry[1])
  end
end
return 0
