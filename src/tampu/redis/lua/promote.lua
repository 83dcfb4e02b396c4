-- Moves due members of the delayed set into the stream, each once whoever asks: added first, removed last.
--
-- KEYS  1 delayed set, 2 stream, 3 dlq, 4 events, then per job its didx
-- ARGV  1 cap of the stream, 2 events to keep (0: no events), 3 dead letters to keep, 4 number of jobs, then per
--       job: member, job id, name, envelope, created at (ms); then per unreadable member: member, detail
-- Reply {promoted, 1 when the stream is full}

local delayed, stream, dlq, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local room = tonumber(ARGV[1]) - redis.call('XLEN', stream)
local jobs = tonumber(ARGV[4])
local promoted, full = 0, 0
local at = 5
for i = 1, jobs do
  local member, job, name, envelope, created = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  at = at + 5
  if redis.call('ZSCORE', delayed, member) then
    if promoted >= room then
      full = 1
      break
    end
    if name == '' then
      redis.call('XADD', stream, '*', 'd', envelope)
    else
      redis.call('XADD', stream, '*', 'd', envelope, 'n', name)
    end
    redis.call('ZREM', delayed, member)
    -- A job of the same id may have been delayed again meanwhile: its index stays.
    if redis.call('GET', KEYS[4 + i]) == member then
      redis.call('DEL', KEYS[4 + i])
    end
    if ARGV[2] ~= '0' then
      if name == '' then
        redis.pcall('XADD', events, 'MAXLEN', '~', ARGV[2], '*', 'e', 'waiting', 'id', job, 'ts', now,
          'created_at_ms', created)
      else
        redis.pcall('XADD', events, 'MAXLEN', '~', ARGV[2], '*', 'e', 'waiting', 'id', job, 'ts', now, 'n', name,
          'created_at_ms', created)
      end
    end
    promoted = promoted + 1
  end
end
for i = 5 + jobs * 5, #ARGV, 2 do
  if redis.call('ZSCORE', delayed, ARGV[i]) then
    redis.call('XADD', dlq, 'MAXLEN', '~', ARGV[3], '*', 'd', ARGV[i], 'source_id', '', 'reason', 'malformed', 'detail',
      ARGV[i + 1], 'ts', now)
    redis.call('ZREM', delayed, ARGV[i])
  end
end
return {promoted, full}
