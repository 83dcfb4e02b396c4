-- Adds a window of jobs, once, however often it is sent.
--
-- The short form, for jobs that all run now under one name, in a numbered window of a queue that refuses when full:
-- KEYS  1 state of the chain, 2 stream
-- ARGV  1 cap of the stream   2 number of the window in its chain   3 TTL to give the chain's state, seconds (0: leave it)
--       4 name of the jobs, then their envelopes
--
-- The long form, for everything:
-- KEYS  1 state of the chain, 2 stream, 3 delayed set; then, job by job, what its kind needs: dlid, didx
-- ARGV  1 ''   2 number of the window (0: no chain)   3 TTL as above
--       4 cap of the stream    5 overflow: reject, wait or trim    6 dedup TTL, seconds
--       7 producer id for XADD IDMP, or ''   8 number of jobs
--       then runs of jobs alike: kind, count, name, and per job its envelope (and when it is due)
-- Kinds n: now; i: now, explicit id (key dlid); d: delayed (key didx); e: delayed, explicit id (keys dlid, didx).
-- Due   '+ms' from now by this server's clock, or an epoch time in ms.
--
-- Reply '' or {'ok', codes, error}: one letter a job, a added, d duplicate, f full, e error (its text follows);
--       '' and no codes mean that all were added
--       {'gap', last}: a window before this one is missing; nothing was written
--       {'full', taken, codes}: wait only; so many were taken from the front, send the same window again
--
-- A window that was applied answers with its stored codes, if any. One that was refused does not advance the chain, so
-- that the windows behind it answer 'gap' and nothing is overtaken. Errors of single jobs are caught: after the first
-- write nothing may raise, or a resend would add the first jobs again.

local args, call = ARGV, redis.call
local chain, stream, number = KEYS[1], KEYS[2], tonumber(args[2])
local is_short = args[1] ~= ''

-- The common case in as few steps as can be: the next of the chain, and room for all.
if is_short then
  local total = #args - 4
  if call('XLEN', stream) + total <= tonumber(args[1]) then
    local added, failure = 0, nil
    if call('HINCRBY', chain, 'last', 1) == number then
      local name, try = args[4], redis.pcall
      while added < total and not failure do
        local reply
        if name == '' then
          reply = try('XADD', stream, '*', 'd', args[5 + added])
        else
          reply = try('XADD', stream, '*', 'd', args[5 + added], 'n', name)
        end
        if type(reply) == 'table' then
          failure = reply
        else
          added = added + 1
        end
      end
      if added > 0 then
        if args[3] ~= '0' then
          try('EXPIRE', chain, args[3])
        end
        if not failure then
          return ''
        end
        local codes = string.rep('a', added) .. string.rep('e', total - added)
        try('HSET', chain, 'r' .. number % 8, args[2] .. ':' .. codes)
        return {'ok', codes, failure.err}
      end
    end
    if call('HINCRBY', chain, 'last', -1) == 0 then
      call('DEL', chain)
    end
    if failure then
      return failure
    end
  end
end

local function keep_chain()
  if args[3] ~= '0' then
    redis.pcall('EXPIRE', chain, args[3])
  end
end

local cap, overflow, dedup_ttl, producer, total = tonumber(ARGV[1]), 'reject', 0, '', #ARGV - 4
if not is_short then
  cap, overflow, dedup_ttl, producer, total = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
end
local delayed = KEYS[3]

local earlier = ''  -- letters of the jobs that an earlier, stopped run of this window has dealt with
if number > 0 then
  local last = tonumber(redis.call('HGET', chain, 'last') or 0)
  if number <= last then
    keep_chain()
    local of, codes = string.match(redis.call('HGET', chain, 'r' .. number % 8) or '', '^(%d+):(.*)$')
    return {'ok', of == ARGV[2] and codes or '', ''}
  end
  if number > last + 1 then
    return {'gap', last}
  end
  if overflow == 'wait' then
    earlier = redis.call('HGET', chain, 'part') or ''
  end
end

local free = math.huge
if overflow ~= 'trim' then
  free = cap - redis.call('XLEN', stream)
end

local now_ms
local function now()
  if not now_ms then
    local time = redis.call('TIME')
    now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return now_ms
end

local failure = ''
local function failed(reply)
  if type(reply) == 'table' and reply.err then
    failure = reply.err
    return true
  end
  return false
end

-- The job id is the first slot of the envelope.
local function id_of(envelope)
  local lead = string.byte(envelope, 2)
  if lead == 0xd9 then
    return string.sub(envelope, 4, 3 + string.byte(envelope, 3))
  elseif lead == 0xda then
    return string.sub(envelope, 5, 4 + string.byte(envelope, 3) * 256 + string.byte(envelope, 4))
  end
  return string.sub(envelope, 3, 2 + lead - 0xa0)
end

local function append(envelope, name)
  local reply
  if producer == '' and overflow ~= 'trim' then
    if name == '' then
      reply = redis.pcall('XADD', stream, '*', 'd', envelope)
    else
      reply = redis.pcall('XADD', stream, '*', 'd', envelope, 'n', name)
    end
  else
    local command = {'XADD', stream}
    if producer ~= '' then
      command[3], command[4], command[5] = 'IDMP', producer, id_of(envelope)
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
    reply = redis.pcall(unpack(command))
  end
  if failed(reply) then
    return 'e'
  end
  free = free - 1
  return 'a'
end

-- Takes the marker of an explicit id: 'a' taken, 'd' somebody has it, 'e' error.
local function take(marker, ttl)
  local reply = redis.pcall('SET', marker, '1', 'NX', 'EX', ttl)
  return failed(reply) and 'e' or reply and 'a' or 'd'
end

local function append_once(envelope, name, marker)
  local code = take(marker, dedup_ttl)
  if code == 'a' then
    code = append(envelope, name)
    if code == 'e' then
      redis.pcall('DEL', marker)
    end
  end
  return code
end

local function delay(envelope, name, due, index, marker)
  local seconds = math.floor((due - now()) / 1000)
  local code = marker and take(marker, math.max(1, seconds) + dedup_ttl) or 'a'
  if code ~= 'a' then
    return code
  end
  local member = struct.pack('<I4', #name) .. name .. envelope
  if failed(redis.pcall('ZADD', delayed, string.format('%.0f', due), member)) then
    if marker then
      redis.pcall('DEL', marker)
    end
    return 'e'
  end
  redis.pcall('SET', index, member, 'EX', math.max(1, seconds) + (marker and dedup_ttl or 3600))
  return 'a'
end

local argument, key, job = 9, 4, 0
local taken, stopped = #earlier, false
local codes  -- letters of this run, kept only from the first that is not 'a'
while job < total and not stopped do
  local kind, count, name = 'n', total, ARGV[4]
  if is_short then
    argument = 5
  else
    kind, count, name = ARGV[argument], tonumber(ARGV[argument + 1]), ARGV[argument + 2]
    argument = argument + 3
  end
  for _ = 1, count do
    job = job + 1
    local envelope = ARGV[argument]
    argument = argument + 1
    local due, marker, index
    if kind == 'd' or kind == 'e' then
      local text = ARGV[argument]
      argument = argument + 1
      due = tonumber(text)
      if string.byte(text) == 43 then
        due = now() + due
      end
    end
    if kind == 'i' or kind == 'e' then
      marker = KEYS[key]
      key = key + 1
    end
    if kind == 'd' or kind == 'e' then
      index = KEYS[key]
      key = key + 1
    end
    if job > taken then
      local code
      if due and due > now() then
        code = delay(envelope, name, due, index, marker)
      elseif free > 0 then
        code = marker and append_once(envelope, name, marker) or append(envelope, name)
      elseif marker and redis.call('EXISTS', marker) == 1 then
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

local text = earlier .. (codes and table.concat(codes) or string.rep('a', taken - #earlier))
if stopped then
  if number > 0 then
    redis.call('HSET', chain, 'part', text)
    keep_chain()
  end
  return {'full', taken, text}
end
if not string.find(text, '[^a]') then
  text = ''
elseif number == 0 and not string.find(text, '[^e]') then
  return {err = failure}  -- nothing was written: OOM or READONLY, say. (With a chain the last write below raises it.)
end
if earlier ~= '' then
  redis.call('HDEL', chain, 'part')
end
if number > 0 then
  redis.call('HSET', chain, 'last', ARGV[2])
  if text ~= '' then
    redis.call('HSET', chain, 'r' .. number % 8, ARGV[2] .. ':' .. text)
  end
  keep_chain()
end
return {'ok', text, failure}
