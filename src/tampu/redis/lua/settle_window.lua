-- Writes the outcomes of a window of jobs: results, retries and dead letters first, then the acknowledgement, then the
-- events. A failure before the acknowledgement leaves the entry pending, so the job runs again and is never lost. Behind
-- it nothing may raise.
--
-- KEYS  1 stream, 2 delayed set, 3 dlq, 4 events; then the result key of each success with a result; then, for each
--       other outcome: didx (t with an explicit id), the mark of the cancelled job, the index of the marks and dlid (c);
--       then, if there are other outcomes, the wake stream and the due times
-- ARGV  1 group, 2 consumer, 3 '1' if the server supports XACKDEL, 4 events to keep (0: no events), 5 dead letters to
--       keep, 6 TTL of results in seconds, 7 and 8 the lowest and highest entry id of the other outcomes ('' if there
--       are none), 9 the window as MessagePack, three lists; one argument for all costs far less than one for each:
--       `active` events: job id, name, started at (ms), attempt, created at (ms)
--       successes: entry id, job id, name, started at (ms; 0: its `active` event was sent before), finished at (ms),
--         attempt, duration (us), created at (ms), result or ''
--       other outcomes, a list for each: kind, the first eight values as above, then
--         t  retry: reason ('' if the job did not fail), backoff in ms, member of the delayed set, TTL of didx in seconds
--            (0: a generated id, which has none), traceback or ''
--         c  cancelled: reason, how long its mark is kept, in seconds
--         x  dead letter: error ('' when the handler did not run), reason, its fields and values
--
-- Ownership: a success is written if the entry is still pending in any consumer (the first to finish wins). A failure
-- is written only if this consumer owns the entry: a worker that lost its lease must not undo the new owner's success.
--
-- Reply '' if all were written, else {codes, error}: one letter per outcome, successes first: k written and
--       acknowledged, l lost (another consumer owns the entry, or has settled it), h held (could not be written: try
--       again); error is the text of the last failure

--@include lib/due_time.lua
--@include lib/announce.lua
--@include lib/emit_event.lua
--@include lib/failed.lua
--@include lib/now_ms.lua

local call, pcall = redis.call, redis.pcall
local stream, delayed, dlq, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer = ARGV[1], ARGV[2]
local keep_events, keep_letters = ARGV[4], ARGV[5]
local actives, successes, others = unpack(cmsgpack.unpack(ARGV[9]))
local WIDTH = 9  -- values per success
local count = #successes / WIDTH

local codes, key = {}, 5
local function may_be_tried_again()
  -- Out of memory (Redis before 7). Any other error is permanent: report it, do not run the job again.
  return string.find(failure, 'OOM', 1, true)
end

-- One query of the pending list for all failures. Before the first write: it raises if the group is gone.
local ours = {}
if #others > 0 then
  for _, entry in ipairs(call('XPENDING', stream, group, ARGV[7], ARGV[8], 100000, consumer)) do
    ours[entry[1]] = true
  end
end

-- Results are written before it is known which entries are pending: the acknowledgement tells, at no cost. The result of
-- a job that was settled elsewhere is then put back.
local ids, acked, result_keys, former = {}, 0, {}, {}
for i = 1, count do
  local at = (i - 1) * WIDTH
  local result, code = successes[at + 9], 'k'
  if result ~= '' then
    local reply = pcall('SET', KEYS[key], result, 'EX', ARGV[6], 'GET')
    key = key + 1
    if not failed(reply) then
      result_keys[i], former[i] = KEYS[key - 1], reply
    elseif may_be_tried_again() then
      code = 'h'
    end
  end
  codes[i] = code
  if code == 'k' then
    acked = acked + 1
    ids[acked] = successes[at + 1]
  end
end
local done = acked

local read_ms
for i, outcome in ipairs(others) do
  local kind, id, job = outcome[1], outcome[2], outcome[3]
  local code = ours[id] and 'k' or 'l'
  if kind == 't' then
    if code == 'k' then
      read_ms = read_ms or now_ms()
      local due_ms = read_ms + outcome[11]
      if failed(pcall('ZADD', delayed, string.format('%.0f', due_ms), outcome[12])) then
        code = 'h'
      else
        note_delayed(due_ms, outcome[13] == 0 and job)
        if outcome[13] > 0 then  -- as in add_window.lua
          failed(pcall('SET', KEYS[key], outcome[12], 'EX', outcome[13]))
        end
      end
    end
    if outcome[13] > 0 then
      key = key + 1
    end
  elseif kind == 'c' then
    if code == 'k' then
      failed(pcall('SET', KEYS[key], 'c' .. outcome[10], 'EX', outcome[11]))
      failed(pcall('ZREM', KEYS[key + 1], job))
      failed(pcall('DEL', KEYS[key + 2]))
    end
    key = key + 3
  elseif code == 'k' and failed(pcall('XADD', dlq, 'MAXLEN', '~', keep_letters, '*', unpack(outcome[12]))) then
    code = 'h'
  end
  codes[count + i] = code
  if code == 'k' then
    acked = acked + 1
    ids[acked] = id
  end
end

announce(delayed, KEYS[#KEYS - 1], KEYS[#KEYS], read_ms)

-- The acknowledgement. XACKDEL answers for each entry: -1 if it was not pending. Without it, one XACK for each success.
local answers
if acked > 0 and ARGV[3] == '1' then
  answers = pcall('XACKDEL', stream, group, 'IDS', acked, unpack(ids))
end
if acked > 0 and (not answers or answers.err) then
  answers = {}
  for i = 1, done do
    answers[i] = call('XACK', stream, group, ids[i])
  end
  if acked > done then
    call('XACK', stream, group, unpack(ids, done + 1))
  end
  call('XDEL', stream, unpack(ids))
end
local is_whole, nth = true, 0
for i = 1, count do
  if codes[i] == 'k' then
    nth = nth + 1
    if answers[nth] < 1 then
      codes[i] = 'l'
      if former[i] then
        failed(pcall('SET', result_keys[i], former[i], 'KEEPTTL'))
      elseif result_keys[i] then
        failed(pcall('DEL', result_keys[i]))
      end
    end
  end
  is_whole = is_whole and codes[i] == 'k'
end

local emits = keep_events ~= '0'  -- false after the first event that cannot be written
local function check(reply)
  emits = not failed(reply)
end
local function emit(event, job, ts, name, ...)
  if emits then
    check(emit_event(events, keep_events, event, job, ts, name, ...))
  end
end

-- The events of successes, most of all events, are written without a call in between, and only the last trims.
for at = 1, #actives, 5 do
  local job, name, ts, attempt, created = unpack(actives, at, at + 4)
  emit('active', job, ts, name, 'attempt', attempt, 'created_at_ms', created, 'worker', consumer)
end
for i = 1, count do
  if not emits then
    break
  end
  local _, job, name, started, ts, attempt, duration, created = unpack(successes, (i - 1) * WIDTH + 1, i * WIDTH)
  if started == 0 then  -- sent before
  elseif name == '' then
    check(pcall('XADD', events, '*', 'e', 'active', 'id', job, 'ts', started, 'attempt', attempt, 'created_at_ms',
      created, 'worker', consumer))
  else
    check(pcall('XADD', events, '*', 'e', 'active', 'id', job, 'ts', started, 'n', name, 'attempt', attempt,
      'created_at_ms', created, 'worker', consumer))
  end
  if codes[i] ~= 'k' then  -- not the first to finish
  elseif i == count then
    emit('completed', job, ts, name, 'attempt', attempt, 'duration_us', duration, 'created_at_ms', created, 'worker',
      consumer)
  elseif name == '' then
    check(pcall('XADD', events, '*', 'e', 'completed', 'id', job, 'ts', ts, 'attempt', attempt, 'duration_us', duration,
      'created_at_ms', created, 'worker', consumer))
  else
    check(pcall('XADD', events, '*', 'e', 'completed', 'id', job, 'ts', ts, 'n', name, 'attempt', attempt,
      'duration_us', duration, 'created_at_ms', created, 'worker', consumer))
  end
end
for i, outcome in ipairs(others) do
  local kind, _, job, name, started, ts, attempt, duration, created = unpack(outcome, 1, 9)
  is_whole = is_whole and codes[count + i] == 'k'
  if started ~= 0 then
    emit('active', job, started, name, 'attempt', attempt, 'created_at_ms', created, 'worker', consumer)
  end
  if codes[count + i] == 'k' then
    local reason = outcome[10]
    if kind == 'c' then
      emit('cancelled', job, ts, name, 'attempt', attempt, 'reason', reason, 'duration_us', duration, 'created_at_ms',
        created, 'worker', consumer)
    else
      if kind == 't' and outcome[14] ~= '' then
        emit('failed', job, ts, name, 'attempt', attempt, 'reason', reason, 'duration_us', duration, 'created_at_ms',
          created, 'worker', consumer, 'traceback', outcome[14])
      elseif reason ~= '' then
        emit('failed', job, ts, name, 'attempt', attempt, 'reason', reason, 'duration_us', duration, 'created_at_ms',
          created, 'worker', consumer)
      end
      if kind == 't' then
        emit('retry-scheduled', job, ts, name, 'attempt', attempt + 1, 'backoff_ms', outcome[11], 'created_at_ms',
          created, 'worker', consumer)
      else
        emit('dlq', job, ts, name, 'attempt', attempt, 'reason', outcome[11], 'created_at_ms', created, 'worker',
          consumer)
      end
    end
  end
end
if is_whole and failure == '' then
  return ''
end
return {table.concat(codes), failure}
