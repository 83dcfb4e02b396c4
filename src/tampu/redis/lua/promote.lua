-- Moves due members of the delayed set into the stream, each once whoever asks: added first, removed last.
--
-- KEYS  1 delayed set, 2 stream, 3 dlq, 4 events, then per job its didx
-- ARGV  1 cap of the stream, 2 events to keep (0: no events), 3 dead letters to keep, 4 number of jobs, then per
--       job: member, job id, created at (ms); then per unreadable member: member, detail
-- Reply {promoted, buried, 1 when the stream is full, depth, score of the earliest member left or '', error}: buried
--       are the unreadable ones that became dead letters; error is why one could not ('' otherwise)

local delayed, stream, dlq, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local room = tonumber(ARGV[1]) - redis.call('XLEN', stream)
local jobs = tonumber(ARGV[4])
local promoted, buried, full, failure = 0, 0, 0, ''

-- A wrong-typed or forbidden events key costs the events, never a job.
local function tell(event, job, name, ...)
  if ARGV[2] == '0' then
    return
  end
  if name == '' then
    redis.pcall('XADD', events, 'MAXLEN', '~', ARGV[2], '*', 'e', event, 'id', job, 'ts', now, ...)
  else
    redis.pcall('XADD', events, 'MAXLEN', '~', ARGV[2], '*', 'e', event, 'id', job, 'ts', now, 'n', name, ...)
  end
end

-- What an ACL forbids must fail here: after the first job was added, each new try would add it again. And a script
-- that has written something ZREM may do goes on at maxmemory: rightly, as the move frees what it takes.
redis.call('ZREM', delayed, 'no such member')

local at = 5
for i = 1, jobs do
  local member, job, created = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  at = at + 3
  if redis.call('ZSCORE', delayed, member) then
    if promoted >= room then
      full = 1
      break
    end
    local size = struct.unpack('<I4', member)
    local name, envelope = string.sub(member, 5, 4 + size), string.sub(member, 5 + size)
    if name == '' then
      redis.call('XADD', stream, '*', 'd', envelope)
    else
      redis.call('XADD', stream, '*', 'd', envelope, 'n', name)
    end
    redis.call('ZREM', delayed, member)
    -- A job of the same id may have been delayed again meanwhile: its index stays.
    if redis.pcall('GET', KEYS[4 + i]) == member then
      redis.call('DEL', KEYS[4 + i])
    end
    tell('waiting', job, name, 'created_at_ms', created)
    promoted = promoted + 1
  end
end
for i = 5 + jobs * 3, #ARGV, 2 do
  if redis.call('ZSCORE', delayed, ARGV[i]) then
    local reply = redis.pcall('XADD', dlq, 'MAXLEN', '~', ARGV[3], '*', 'd', ARGV[i], 'source_id', '', 'reason',
      'malformed', 'detail', ARGV[i + 1], 'ts', now)
    if type(reply) == 'table' and reply.err then
      failure = reply.err
    else
      redis.call('ZREM', delayed, ARGV[i])
      tell('dlq', '', '', 'attempt', '0', 'reason', 'malformed')
      buried = buried + 1
    end
  end
end
local earliest = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
return {promoted, buried, full, redis.call('ZCARD', delayed), earliest[2] or '', failure}
