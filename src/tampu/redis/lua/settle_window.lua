-- Writes what became of a window of jobs: results, retries, dead letters and events first, acknowledgement last.
-- Whatever fails in between leaves the entry pending, so the job runs again; it is never lost.
--
-- KEYS  1 stream, 2 delayed set, 3 dlq, 4 events; then, outcome by outcome: the result key (r), the didx key (t)
-- ARGV  1 group, 2 consumer, 3 '1' when the server knows XACKDEL, 4 events to keep (0: no events), 5 dead letters to
--       keep, 6 number of `active` events, 7 number of outcomes, 8 and 9 the lowest and highest entry id of these
--       per `active` event: job id, name, started at (ms), attempt, created at (ms)
--       per outcome: kind, entry id, job id, name, finished at (ms), attempt, duration (us), created at (ms), then
--         s  success
--         r  success with a result: bytes, TTL in seconds
--         t  retry: reason, backoff in ms, member of the delayed set, TTL of its index in seconds
--         x  dead letter: error ('' when the handler did not run), reason, number of fields, fields
--
-- Owner rules: a success counts while the entry is pending at all (the first to finish wins); a failure only while
-- it is ours, or a worker that lost its lease would undo the success of the new owner.
--
-- Reply {codes, error}: one letter an outcome: k kept (written and acknowledged), l lost (somebody else's), h held
--       (could not be written: try again); error is the text of the last failure

local stream, delayed, dlq, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer, native = ARGV[1], ARGV[2], ARGV[3] == '1'
local keep_events, keep_letters = ARGV[4], ARGV[5]
local actives, outcomes = tonumber(ARGV[6]), tonumber(ARGV[7])
local failure = ''

local function failed(reply)
  if type(reply) == 'table' and reply.err then
    failure = reply.err
    return true
  end
  return false
end

-- A wrong-typed or forbidden events key costs the events, never a job.
local tells = keep_events ~= '0'
local function tell(event, job, ts, name, ...)
  local reply
  if name == '' then
    reply = redis.pcall('XADD', events, 'MAXLEN', '~', keep_events, '*', 'e', event, 'id', job, 'ts', ts, ...)
  else
    reply = redis.pcall('XADD', events, 'MAXLEN', '~', keep_events, '*', 'e', event, 'id', job, 'ts', ts, 'n', name, ...)
  end
  if failed(reply) then
    tells = false
  end
end

local at = 10
for _ = 1, actives do
  if tells then
    tell('active', ARGV[at], ARGV[at + 2], ARGV[at + 1], 'attempt', ARGV[at + 3], 'created_at_ms', ARGV[at + 4],
      'worker', consumer)
  end
  at = at + 5
end

-- Asked once for all of them: who owns what.
local ours = {}
if outcomes > 0 then
  for _, entry in ipairs(redis.call('XPENDING', stream, group, ARGV[8], ARGV[9], 100000, consumer)) do
    ours[entry[1]] = true
  end
end

local codes, acks = {}, {}
local key, now_ms = 5, nil
for i = 1, outcomes do
  local kind, id, job, name, ts = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local attempt, duration, created = ARGV[at + 5], ARGV[at + 6], ARGV[at + 7]
  at = at + 8
  local code = 'k'
  local is_success = kind == 's' or kind == 'r'
  if not ours[id] and not (is_success and #redis.call('XPENDING', stream, group, id, id, 1) > 0) then
    code = 'l'
  end
  if kind == 's' then
    if code == 'k' and tells then
      tell('completed', job, ts, name, 'attempt', attempt, 'duration_us', duration, 'created_at_ms', created,
        'worker', consumer)
    end
  elseif kind == 'r' then
    if code == 'k' then
      -- Without memory (Redis before 7) it waits; a result that can never be stored is reported, not run again.
      if failed(redis.pcall('SET', KEYS[key], ARGV[at], 'EX', ARGV[at + 1])) and string.find(failure, 'OOM', 1, true) then
        code = 'h'
      elseif tells then
        tell('completed', job, ts, name, 'attempt', attempt, 'duration_us', duration, 'created_at_ms', created,
          'worker', consumer)
      end
    end
    key = key + 1
    at = at + 2
  elseif kind == 't' then
    if code == 'k' then
      if not now_ms then
        local time = redis.call('TIME')
        now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
      end
      local due = string.format('%.0f', now_ms + tonumber(ARGV[at + 1]))
      if failed(redis.pcall('ZADD', delayed, due, ARGV[at + 2])) then
        code = 'h'
      else
        failed(redis.pcall('SET', KEYS[key], ARGV[at + 2], 'EX', ARGV[at + 3]))
        if tells then
          tell('failed', job, ts, name, 'attempt', attempt, 'reason', ARGV[at], 'duration_us', duration,
            'created_at_ms', created, 'worker', consumer)
          tell('retry-scheduled', job, ts, name, 'attempt', string.format('%d', tonumber(attempt) + 1), 'backoff_ms',
            ARGV[at + 1], 'created_at_ms', created, 'worker', consumer)
        end
      end
    end
    key = key + 1
    at = at + 4
  else
    local reason, fields = ARGV[at + 1], tonumber(ARGV[at + 2])
    if code == 'k' then
      local command = {'XADD', dlq, 'MAXLEN', '~', keep_letters, '*'}
      for f = 1, fields do
        command[6 + f] = ARGV[at + 2 + f]
      end
      if failed(redis.pcall(unpack(command))) then
        code = 'h'
      elseif tells then
        if ARGV[at] ~= '' then
          tell('failed', job, ts, name, 'attempt', attempt, 'reason', ARGV[at], 'duration_us', duration,
            'created_at_ms', created, 'worker', consumer)
        end
        tell('dlq', job, ts, name, 'attempt', attempt, 'reason', reason, 'created_at_ms', created, 'worker', consumer)
      end
    end
    at = at + 3 + fields
  end
  codes[i] = code
  if code == 'k' then
    acks[#acks + 1] = id
  end
end

if #acks > 0 then
  if native then
    redis.call('XACKDEL', stream, group, 'IDS', #acks, unpack(acks))
  else
    redis.call('XACK', stream, group, unpack(acks))
    redis.call('XDEL', stream, unpack(acks))
  end
end
return {table.concat(codes), failure}
