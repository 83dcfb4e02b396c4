-- Moves due members of the delayed set into the stream, each exactly once, even with several promoters: adds them first
-- and removes them last.
--
-- KEYS  1 delayed set, 2 stream, 3 dlq, 4 events, then per job its didx
-- ARGV  1 maximum length of the stream, 2 events to keep (0: no events), 3 dead letters to keep, 4 number of jobs (at
--       most a few hundred), then the member of each; with events, job id and created at (ms) of each; then per
--       unreadable member: member, detail
-- Reply {promoted, buried, 1 if the stream is full, error}: buried is the number of unreadable members that were
--       dead-lettered; error is why one could not be ('' otherwise)

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

-- If an ACL forbids ZREM, fail here: after the first job was added, each retry would add it again. Also, at maxmemory a
-- script may continue after a write that needs no memory, such as ZREM; that is fine, as a move frees what it uses.
redis.call('ZREM', delayed, 'no such member')

-- Commands take many keys and members at once: one call per job would cost more than the work itself.
local moved, refusal, scores = {}, nil, nil
if jobs > 0 then
  -- Another promoter may have moved some since they were read, or they may have been rescheduled.
  scores = redis.call('ZMSCORE', delayed, unpack(ARGV, 5, 4 + jobs))
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
  -- A job with the same id may have been delayed again in the meantime: keep its index.
  local indexed, next_moved = redis.call('MGET', unpack(KEYS, 5, 4 + jobs)), 1
  local stale, stale_count = {}, 0
  for i = 1, jobs do
    if ARGV[4 + i] == moved[next_moved] then
      next_moved = next_moved + 1
      if indexed[i] == ARGV[4 + i] or indexed[i] == scores[i] then
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
