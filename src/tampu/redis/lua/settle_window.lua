-- Writes the outcomes of a window of jobs: results, retries, dead letters and events first, the acknowledgement last.
-- A failure in between leaves the entry pending, so the job runs again and is never lost.
--
-- KEYS  1 stream, 2 delayed set, 3 dlq, 4 events; then, outcome by outcome: the result key (r), the didx key (t), the
--       mark of the cancelled job, the index of the marks and dlid (c)
-- ARGV  1 group, 2 consumer, 3 '1' if the server supports XACKDEL, 4 events to keep (0: no events), 5 dead letters to
--       keep, 6 number of `active` events, 7 number of outcomes, 8 and 9 the lowest and highest entry id of these
--       per `active` event: job id, name, started at (ms), attempt, created at (ms)
--       per outcome: kind, entry id, job id, name, finished at (ms), attempt, duration (us), created at (ms), then
--         s  success
--         r  success with a result: bytes, TTL in seconds
--         t  retry: reason ('' if the job did not fail), backoff in ms, member of the delayed set, TTL of its index in
--            seconds, traceback or ''
--         c  cancelled: reason, how long its mark is kept, in seconds
--         x  dead letter: error ('' when the handler did not run), reason, number of fields, fields
--
-- Ownership: a success is written if the entry is still pending in any consumer (the first to finish wins). A failure
-- is written only if this consumer owns the entry: a worker that lost its lease must not undo the new owner's success.
--
-- Reply {codes, error}: one letter per outcome: k written and acknowledged, l lost (another consumer owns the entry), h
--       held (could not be written: try again); error is the text of the last failure

--@include lib/ack_and_delete.lua
--@include lib/emit_event.lua
--@include lib/failed.lua
--@include lib/now_ms.lua

local stream, delayed, dlq, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer, has_xackdel = ARGV[1], ARGV[2], ARGV[3] == '1'
local keep_events, keep_letters = ARGV[4], ARGV[5]
local actives, outcomes = tonumber(ARGV[6]), tonumber(ARGV[7])

local at, key = 10, 5  -- the next argument and the next key
local emits = keep_events ~= '0'  -- false after the first event that cannot be written
for _ = 1, actives do
  emits = emits and not failed(emit_event(events, keep_events, 'active', ARGV[at], ARGV[at + 2], ARGV[at + 1],
    'attempt', ARGV[at + 3], 'created_at_ms', ARGV[at + 4], 'worker', consumer))
  at = at + 5
end

-- One query of the pending list for all outcomes.
local ours = {}
if outcomes > 0 then
  for _, entry in ipairs(redis.call('XPENDING', stream, group, ARGV[8], ARGV[9], 100000, consumer)) do
    ours[entry[1]] = true
  end
end

local codes, acks, read_ms = {}, {}, nil
for i = 1, outcomes do
  local kind, id, job, name, ts = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local attempt, duration, created = ARGV[at + 5], ARGV[at + 6], ARGV[at + 7]
  local is_success = kind == 's' or kind == 'r'
  local own = at + 8  -- index of the first argument of its kind
  local code = 'k'
  if not ours[id] and not (is_success and #redis.call('XPENDING', stream, group, id, id, 1) > 0) then
    code = 'l'
  end

  if kind == 's' then
    at = own
  elseif kind == 'r' then
    -- Out of memory (Redis before 7): hold it. Any other error is permanent: report it, do not run the job again.
    if code == 'k' and failed(redis.pcall('SET', KEYS[key], ARGV[own], 'EX', ARGV[own + 1]))
      and string.find(failure, 'OOM', 1, true) then
      code = 'h'
    end
    at, key = own + 2, key + 1
  elseif kind == 't' then
    if code == 'k' then
      read_ms = read_ms or now_ms()
      local due = string.format('%.0f', read_ms + tonumber(ARGV[own + 1]))
      if failed(redis.pcall('ZADD', delayed, due, ARGV[own + 2])) then
        code = 'h'
      else
        failed(redis.pcall('SET', KEYS[key], ARGV[own + 2], 'EX', ARGV[own + 3]))
      end
    end
    at, key = own + 5, key + 1
  elseif kind == 'c' then
    if code == 'k' then
      failed(redis.pcall('SET', KEYS[key], 'c' .. ARGV[own], 'EX', ARGV[own + 1]))
      failed(redis.pcall('ZREM', KEYS[key + 1], job))
      failed(redis.pcall('DEL', KEYS[key + 2]))
    end
    at, key = own + 2, key + 3
  else
    at = own + 3 + tonumber(ARGV[own + 2])
    if code == 'k' and failed(redis.pcall('XADD', dlq, 'MAXLEN', '~', keep_letters, '*', unpack(ARGV, own + 3, at - 1))) then
      code = 'h'
    end
  end

  codes[i] = code
  if code == 'k' then
    acks[#acks + 1] = id
    if is_success then
      emits = emits and not failed(emit_event(events, keep_events, 'completed', job, ts, name, 'attempt', attempt,
        'duration_us', duration, 'created_at_ms', created, 'worker', consumer))
    elseif kind == 'c' then
      emits = emits and not failed(emit_event(events, keep_events, 'cancelled', job, ts, name, 'attempt', attempt,
        'reason', ARGV[own], 'duration_us', duration, 'created_at_ms', created, 'worker', consumer))
    else
      if kind == 't' and ARGV[own + 4] ~= '' then
        emits = emits and not failed(emit_event(events, keep_events, 'failed', job, ts, name, 'attempt', attempt,
          'reason', ARGV[own], 'duration_us', duration, 'created_at_ms', created, 'worker', consumer,
          'traceback', ARGV[own + 4]))
      elseif ARGV[own] ~= '' then
        emits = emits and not failed(emit_event(events, keep_events, 'failed', job, ts, name, 'attempt', attempt,
          'reason', ARGV[own], 'duration_us', duration, 'created_at_ms', created, 'worker', consumer))
      end
      if kind == 't' then
        emits = emits and not failed(emit_event(events, keep_events, 'retry-scheduled', job, ts, name, 'attempt',
          string.format('%d', tonumber(attempt) + 1), 'backoff_ms', ARGV[own + 1], 'created_at_ms', created,
          'worker', consumer))
      else
        emits = emits and not failed(emit_event(events, keep_events, 'dlq', job, ts, name, 'attempt', attempt,
          'reason', ARGV[own + 1], 'created_at_ms', created, 'worker', consumer))
      end
    end
  end
end

if #acks > 0 then
  ack_and_delete(stream, group, acks, has_xackdel)
end
return {table.concat(codes), failure}
