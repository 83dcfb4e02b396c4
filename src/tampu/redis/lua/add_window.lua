-- Adds a window of jobs, once, however often it is sent. add_plain_window.lua adds the most frequent kind of window.
--
-- KEYS  1 state of the chain, 2 stream, 3 delayed set, 4 wake stream, 5 due times; then the keys that each job's kind
--       needs: dlid, cancel mark, didx
-- ARGV  1 number of the window in its chain (0: no chain), 2 new TTL of the chain's state in seconds (0: unchanged)
--       3 maximum length of the stream, 4 overflow: reject, wait or trim, 5 dedup TTL in seconds
--       6 producer id for XADD IDMP, or '', 7 number of jobs
--       then runs of jobs of one kind, name and due time: kind, count, name, (due time,) and the envelope of each
-- Kinds n: now; i: now, explicit id (keys dlid, cancel mark); d: delayed; e: delayed, explicit id (all three keys).
-- Due   '+ms' from now by this server's clock, or an epoch time in ms.
--
-- Reply '' or {'ok', codes, error}: one letter per job, a added, d duplicate, f full, e error (its text follows);
--       '' and empty codes mean that all were added
--       {'gap', last}: a window before this one is missing; nothing was written
--       {'full', taken, codes}: only for wait; the first `taken` jobs are done, send the same window again
--
-- A chain is a hash: `last` is the number of the last applied window, `r0` to `r7` are 'number:codes' of recent windows
-- that were not added completely, `part` the codes of a window that stopped because the queue was full. A window that
-- was applied before gets its stored codes. A stopped window does not advance the chain, so the windows after it get
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
local cap, overflow, dedup_ttl, producer = tonumber(args[3]), args[4], tonumber(args[5]), args[6]
local total = tonumber(args[7])

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
    return reply_out_of_turn(chain, args[1], last)
  end
  if overflow == 'wait' then
    earlier = call('HGET', chain, 'part') or ''
  end
end

local room = math.huge
if overflow ~= 'trim' then
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
  if producer == '' and overflow ~= 'trim' then
    reply = append_entry(pcall, stream, envelope, name)
  else
    local command = {'XADD', stream}
    if producer ~= '' then
      command[3], command[4], command[5] = 'IDMP', producer, job_id(envelope)
    end
    if overflow == 'trim' then
      local size = #command
      command[size + 1], command[size + 2], command[size + 3] = 'MAXLEN', '~', cap
    end
    local size = #command
    command[size + 1], command[size + 2], command[size + 3] = '*', 'd', envelope
    if name ~= '' then
      command[size + 4], command[size + 5] = 'n', name
    end
    reply = pcall(unpack(command))
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

local function due_ms(text)
  local due = tonumber(text)
  if string.byte(text) == 43 then  -- '+'
    due = now() + due
  end
  return due
end

local argument, key, job = 8, 6, 0
local taken, stopped = #earlier, false
local codes  -- of this run; nil as long as all are 'a'
while job < total and not stopped do
  local kind, count, name = args[argument], tonumber(args[argument + 1]), args[argument + 2]
  local has_id, due = kind == 'i' or kind == 'e', nil
  argument = argument + 3
  if kind == 'd' or kind == 'e' then
    due = due_ms(args[argument])
    argument = argument + 1
  end
  for _ = 1, count do
    job = job + 1
    local envelope = args[argument]
    argument = argument + 1
    local marker, cancel_mark, index
    if has_id then
      marker, cancel_mark = KEYS[key], KEYS[key + 1]
      key = key + 2
    end
    if kind == 'e' then
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
elseif number == 0 and not string.find(text, '[^e]') then
  return {err = failure}  -- nothing was written (OOM, for example); with a chain the write below raises the error
end
if earlier ~= '' then
  call('HDEL', chain, 'part')
end
if number > 0 then
  call('HSET', chain, 'last', args[1])
  if text ~= '' then
    call('HSET', chain, 'r' .. number % 8, args[1] .. ':' .. text)
  end
  keep_chain()
end
return {'ok', text, failure}
