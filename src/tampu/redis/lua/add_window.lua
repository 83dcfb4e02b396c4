-- Adds a window of jobs, once, however often it is sent. add_plain_window.lua adds the most frequent kind of window.
--
-- KEYS  1 state of the chain, 2 stream, 3 delayed set, 4 wake stream, 5 due times; then the keys of each job with an
--       explicit id: dlid, cancel mark and, if it has a due time, didx
-- ARGV  1 number of the window in its chain (0: no chain), 2 new TTL of the chain's state in seconds (0: unchanged)
--       3 maximum length of the stream, 4 overflow: reject, wait, trim, or hold: all jobs or none
--       5 dedup TTL in seconds, 6 digest of the window or '', 7 number of jobs
--       then runs of jobs with the same attributes: the attributes, and the envelope of each job
-- Attributes are a MessagePack map: `count` and `name` of the jobs; their due time, `in` ms by this server's clock or
-- `at` an epoch time in ms, one for all or a list; `ids` if their ids are explicit.
--
-- Reply '' or {'ok', codes, error}: one letter per job, a added, d duplicate, f full, e error (its text follows);
--       '' and empty codes mean that all were added
--       {'gap', last}: a window before this one is missing; nothing was written. Last is 0 if the chain is not known here,
--       and -1 if the keys of the jobs do not exist either: all data are lost
--       {'full', taken, codes}: only for wait and hold; the first `taken` jobs are done, send the same window again
--       {'done'}, {'differs'}: only with a digest; this window was applied before, or another one with its number
--
-- A chain is a hash: `last` is the number of the last applied window, `r0` to `r7` are 'number:codes' of recent windows
-- that were not added completely, `part` the codes of a window that stopped because the queue was full, `d<number>` the
-- digest of a window that has one: those of the Spark sink, whose task may run again with other rows. A window that was
-- applied before gets its stored codes. A stopped window does not advance the chain, so the windows after it get
-- 'gap' and cannot overtake it. Errors of single jobs are caught: nothing may raise after the first write, or a resend
-- would add the first jobs again.

--@include lib/due_time.lua
--@include lib/announce.lua
--@include lib/append_entry.lua
--@include lib/delayed_member.lua
--@include lib/failed.lua
--@include lib/job_id.lua
--@include lib/now_ms.lua
--@include lib/reply_out_of_turn.lua

local args, call, pcall = ARGV, redis.call, redis.pcall
local chain, stream, delayed, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local number, chain_ttl = tonumber(args[1]), args[2]
local cap, overflow, dedup_ttl = tonumber(args[3]), args[4], tonumber(args[5])
local digest, total = args[6], tonumber(args[7])

local function keep_chain()
  if chain_ttl ~= '0' then
    pcall('EXPIRE', chain, chain_ttl)
  end
end

local earlier = ''  -- codes from an earlier run of this window that stopped
if number > 0 then
  local last = tonumber(call('HGET', chain, 'last') or 0)
  if number ~= last + 1 then
    keep_chain()
    if digest ~= '' and number <= last then
      return {call('HGET', chain, 'd' .. number) == digest and 'done' or 'differs'}
    end
    return reply_out_of_turn(chain, args[1], last, stream, delayed)
  end
  if overflow == 'wait' then
    earlier = call('HGET', chain, 'part') or ''
  end
end

local room = math.huge
if overflow == 'hold' then
  -- A full stream holds back delayed jobs, too. A window larger than the maximum is added to an empty stream, or it
  -- would wait forever.
  local length, needed, argument = call('XLEN', stream), 0, 8
  call('ZCARD', delayed)  -- raises before the first write if the key has another type
  while length > 0 and length + total > cap and args[argument] do
    local attributes = cmsgpack.unpack(args[argument])
    needed = needed + (attributes.at and 0 or attributes.count)
    argument = argument + 1 + attributes.count
  end
  if length > 0 and length + needed > cap then
    return {'full', 0, ''}
  end
elseif overflow ~= 'trim' then
  room = cap - call('XLEN', stream)
end

local read_ms
local function now()
  read_ms = read_ms or now_ms()
  return read_ms
end

-- Each of the functions below handles one job and returns its code.

local function append(envelope, name)
  local reply
  if overflow ~= 'trim' then
    reply = append_entry(pcall, stream, envelope, name)
  elseif name == '' then
    reply = pcall('XADD', stream, 'MAXLEN', '~', cap, '*', 'd', envelope)
  else
    reply = pcall('XADD', stream, 'MAXLEN', '~', cap, '*', 'd', envelope, 'n', name)
  end
  if failed(reply) then
    return 'e'
  end
  room = room - 1
  return 'a'
end

-- Sets the marker of an explicit id: 'a' set, 'd' duplicate, 'e' error. A request to cancel an earlier job of that id
-- must not cancel this one.
local function take(marker, ttl, cancel_mark)
  local reply = pcall('SET', marker, '1', 'NX', 'EX', ttl)
  if failed(reply) then
    return 'e'
  elseif not reply then
    return 'd'
  end
  pcall('DEL', cancel_mark)
  return 'a'
end

local function append_once(envelope, name, marker, cancel_mark)
  local code = take(marker, dedup_ttl, cancel_mark)
  if code == 'a' then
    code = append(envelope, name)
    if code == 'e' then
      pcall('DEL', marker)
    end
  end
  return code
end

local function delay(envelope, name, due, index, marker, cancel_mark)
  local seconds = math.max(1, math.floor((due - now()) / 1000))
  local code = marker and take(marker, seconds + dedup_ttl, cancel_mark) or 'a'
  if code ~= 'a' then
    return code
  end
  local member = delayed_member(name, envelope)
  if failed(pcall('ZADD', delayed, string.format('%.0f', due), member)) then
    if marker then
      pcall('DEL', marker)
    end
    return 'e'
  end
  note_delayed(due, not marker and job_id(envelope))
  if marker then
    -- Other implementations read the member of an explicit id here.
    pcall('SET', index, member, 'EX', seconds + dedup_ttl)
  end
  return 'a'
end

local argument, key, job = 8, 6, 0
local taken, stopped = #earlier, false
local codes  -- of this run; nil as long as all are 'a'
while job < total and not stopped do
  local attributes = cmsgpack.unpack(args[argument])
  local name, count, has_id = attributes.name, attributes.count, attributes.ids
  local times, zero = attributes.at or attributes['in'], attributes['in'] and now() or 0
  argument = argument + 1
  if not times and not has_id and overflow ~= 'trim' and not codes and taken == job then
    -- The same as `append`, inlined up to the first error: function calls would cost a third of the server's time.
    local first = argument
    for at = first, first + math.min(count, room) - 1 do
      local reply
      if name == '' then
        reply = pcall('XADD', stream, '*', 'd', args[at])
      else
        reply = pcall('XADD', stream, '*', 'd', args[at], 'n', name)
      end
      if type(reply) == 'table' then
        break
      end
      argument = at + 1
    end
    local done = argument - first
    job, taken, count, room = job + done, taken + done, count - done, room - done
  end
  for i = 1, count do
    job = job + 1
    local due = times and zero + (type(times) == 'table' and times[i] or times)
    local envelope = args[argument]
    argument = argument + 1
    local marker, cancel_mark, index
    if has_id then
      marker, cancel_mark = KEYS[key], KEYS[key + 1]
      key = key + 2
    end
    if has_id and due then
      index = KEYS[key]
      key = key + 1
    end
    if job > taken then
      local code
      if due and due > now() then
        code = delay(envelope, name, due, index, marker, cancel_mark)
      elseif room > 0 then
        code = marker and append_once(envelope, name, marker, cancel_mark) or append(envelope, name)
      elseif marker and call('EXISTS', marker) == 1 then
        code = 'd'
      elseif overflow == 'wait' then
        stopped = true
        break
      else
        code = 'f'
      end
      if code ~= 'a' and not codes then
        codes = {string.rep('a', taken - #earlier)}
      end
      if codes then
        codes[#codes + 1] = code
      end
      taken = job
    end
  end
end

announce(delayed, wake, KEYS[5], read_ms)
local text = earlier .. (codes and table.concat(codes) or string.rep('a', taken - #earlier))
if stopped then
  if number > 0 then
    call('HSET', chain, 'part', text)
    keep_chain()
  end
  return {'full', taken, text}
end
if not string.find(text, '[^a]') then
  text = ''
elseif (number == 0 or digest ~= '') and not string.find(text, '[^e]') then
  return {err = failure}  -- nothing was written (OOM, for example); in the chain of a producer, the write below raises
end
if earlier ~= '' then
  call('HDEL', chain, 'part')
end
if number > 0 then
  call('HSET', chain, 'last', args[1])
  -- Without its digest, a window that was added in part is not 'done' when its task runs again.
  if digest ~= '' and not string.find(text, 'e') then
    call('HSET', chain, 'd' .. number, digest)
  end
  if text ~= '' then
    call('HSET', chain, 'r' .. number % 8, args[1] .. ':' .. text)
  end
  keep_chain()
end
return {'ok', text, failure}
