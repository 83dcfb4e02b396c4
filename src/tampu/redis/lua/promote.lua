-- Moves due members of the delayed set into the stream, each once whoever asks: added first, removed last.
--
-- KEYS  1 delayed set, 2 stream, 3 dlq, 4 events, then per job its didx
-- ARGV  1 cap of the stream, 2 events to keep (0: no events), 3 dead letters to keep, 4 number of jobs (some hundreds
--       at most), then the member of each; with events, job id and created at (ms) of each; then per unreadable
--       member: member, detail
-- Reply {promoted, buried, 1 when the stream is full, error}: buried are the unreadable ones that became dead letters;
--       error is why one could not ('' otherwise)

--@include lib/append_entry.lua
--@include lib/emit_event.lua
--@include lib/failed.lua
--@include lib/now_ms.lua

local delayed, stream, dlq, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local keep_events, has_events = ARGV[2], ARGV[2] ~= '0'
local due_until = now_ms()
local now = string.format('%.0f', due_until)
local room = tonumber(ARGV[1]) - redis.call('XLEN', stream)
local jobs = tonumber(ARGV[4])
local promoted, buried, full = 0, 0, 0

-- What an ACL forbids must fail here: after the first job was added, each new try would add it again. And a script
-- that has written something ZREM may do goes on at maxmemory: rightly, as the move frees what it takes.
redis.call('ZREM', delayed, 'no such member')

-- Commands over many keys and members at once: one for each job would cost more than what it does.
local moved, refusal = {}, nil
if jobs > 0 then
  -- Since they were read some may have been moved by another, or put off.
  local scores = redis.call('ZMSCORE', delayed, unpack(ARGV, 5, 4 + jobs))
  for i = 1, jobs do
    if scores[i] and tonumber(scores[i]) <= due_until then
      if promoted >= room then
        full = 1
        break
      end
      local member = ARGV[4 + i]
      local size = struct.unpack('<I4', member)
      local name = string.sub(member, 5, 4 + size)
      local reply = append_entry(redis.pcall, stream, string.sub(member, 5 + size), name)
      if type(reply) == 'table' then
        refusal = reply
        break
      end
      promoted = promoted + 1
      moved[promoted] = member
      if has_events then
        local job, created = ARGV[3 + jobs + 2 * i], ARGV[4 + jobs + 2 * i]
        emit_event(events, keep_events, 'waiting', job, now, name, 'created_at_ms', created)
      end
    end
  end
  if refusal and promoted == 0 then
    return refusal
  end
end
if promoted > 0 then
  redis.call('ZREM', delayed, unpack(moved))
  -- A job of the same id may have been delayed again meanwhile: its index stays.
  local indexed, next_moved = redis.call('MGET', unpack(KEYS, 5, 4 + jobs)), 1
  local stale, stale_count = {}, 0
  for i = 1, jobs do
    if ARGV[4 + i] == moved[next_moved] then
      next_moved = next_moved + 1
      if indexed[i] == ARGV[4 + i] then
        stale_count = stale_count + 1
        stale[stale_count] = KEYS[4 + i]
      end
    end
  end
  if stale_count > 0 then
    redis.call('DEL', unpack(stale))
  end
end

for i = 5 + jobs * (has_events and 3 or 1), #ARGV, 2 do
  if redis.call('ZSCORE', delayed, ARGV[i]) then
    local reply = redis.pcall('XADD', dlq, 'MAXLEN', '~', ARGV[3], '*', 'd', ARGV[i], 'source_id', '', 'reason',
      'malformed', 'detail', ARGV[i + 1], 'ts', now)
    if not failed(reply) then
      redis.call('ZREM', delayed, ARGV[i])
      if has_events then
        emit_event(events, keep_events, 'dlq', '', now, '', 'attempt', '0', 'reason', 'malformed')
      end
      buried = buried + 1
    end
  end
end
return {promoted, buried, full, failure}
