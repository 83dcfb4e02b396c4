-- Adds a window of jobs, once, however often it is sent: the fast path for numbered windows whose jobs all run now and
-- have one name, in a queue that rejects jobs when it is full. add_window.lua adds every other kind of window.
--
-- KEYS  1 state of the chain, 2 stream
-- ARGV  1 maximum length of the stream, 2 number of the window in its chain, 3 new TTL of the chain's state in seconds
--       (0: unchanged), 4 name of the jobs, then their envelopes
-- Reply as in add_window.lua, which also describes the chain; never 'full'

local args, call, pcall = ARGV, redis.call, redis.pcall
local chain, stream, number = KEYS[1], KEYS[2], tonumber(args[2])
local name, total = args[4], #args - 4
local room = tonumber(args[1]) - call('XLEN', stream)
local max_added = room < total and math.max(room, 0) or total

if room < total then
  -- A full queue may also mean a full memory. Then writes fail, but a resent window must still get its stored reply.
  --@include lib/reply_out_of_turn.lua
  local last = tonumber(call('HGET', chain, 'last') or 0)
  if number <= last then
    return reply_out_of_turn(chain, args[2], last)
  end
end

-- One write checks whether the window is the next of its chain, and advances the chain.
local is_next = call('HINCRBY', chain, 'last', 1) == number
local added, failure = 0, nil
for i = 5, is_next and 4 + max_added or 0 do
  -- The same as append_entry.lua, inlined: a function call per job would cost 7 % of the server's time.
  local reply
  if name == '' then
    reply = pcall('XADD', stream, '*', 'd', args[i])
  else
    reply = pcall('XADD', stream, '*', 'd', args[i], 'n', name)
  end
  if type(reply) == 'table' then
    failure = reply
    break
  end
  added = added + 1
end
if args[3] ~= '0' then
  pcall('EXPIRE', chain, args[3])
end
if added == total then
  return ''
end

if is_next and (added > 0 or not failure) then
  local codes = string.rep('a', added) .. string.rep('e', max_added - added) .. string.rep('f', total - max_added)
  pcall('HSET', chain, 'r' .. number % 8, args[2] .. ':' .. codes)
  return {'ok', codes, failure and failure.err or ''}
end

-- Nothing was added: restore the chain.
local last = call('HINCRBY', chain, 'last', -1)
if last == 0 then
  call('DEL', chain)
end
if failure then
  return failure
end
--@include lib/reply_out_of_turn.lua
return reply_out_of_turn(chain, args[2], last, stream)
