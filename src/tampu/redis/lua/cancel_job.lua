-- Cancels a job: a delayed one is removed at once; one in the stream gets a mark, which its worker acts on.
--
-- KEYS  1 delayed set, 2 didx, 3 dlid, 4 mark of the job, 5 index of the marks, 6 events, 7 due times
-- ARGV  1 member of the delayed set, or '' to look it up, 2 job id, 3 reason, 4 '1' to mark a job in the stream,
--       5 how long marks are kept, seconds
-- Reply 1 cancelled, 2 marked, 0 neither: it is not in the delayed set
--
-- A mark is 'r' and the reason while cancelling is requested, 'c' and the reason once the job is cancelled. The index
-- orders marks by a number that only grows, so that a worker reads each new one once, whatever the clock does.

--@include lib/creation_time.lua
--@include lib/job_id.lua
--@include lib/due_time.lua
--@include lib/find_delayed.lua
--@include lib/now_ms.lua

local delayed, didx, dlid, mark, index, events, due = unpack(KEYS)
local member, job, reason, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[5]

if member == '' then
  member = find_delayed(delayed, didx, due, job)
end
if member and redis.call('ZREM', delayed, member) == 1 then
  redis.call('DEL', didx, dlid)
  redis.call('HDEL', due, due_field(job))
  redis.call('SET', mark, 'c' .. reason, 'EX', ttl)
  local size = struct.unpack('<I4', member)
  local fields = {'e', 'cancelled', 'id', job, 'ts', string.format('%.0f', now_ms())}
  if size > 0 then
    fields[7], fields[8] = 'n', string.sub(member, 5, 4 + size)
  end
  fields[#fields + 1], fields[#fields + 2] = 'reason', reason
  local envelope = string.sub(member, 5 + size)
  local id, payload_at = job_id(envelope)
  local created = id and creation_time(envelope, payload_at) or '0'
  if created ~= '0' then
    fields[#fields + 1], fields[#fields + 2] = 'created_at_ms', created
  end
  redis.pcall('XADD', events, '*', unpack(fields))
  return 1
end
if ARGV[4] ~= '1' then
  return 0
end
-- Remove scores that no clock reaches (2^52; workers ignore them too): tampu did not write them. A worker that has read
-- up to an infinite score would miss all later marks.
redis.call('ZREMRANGEBYSCORE', index, '(4503599627370496', '+inf')
local newest = redis.call('ZRANGE', index, -1, -1, 'WITHSCORES')
local now = now_ms()
local score = math.max(now, (tonumber(newest[2]) or 0) + 1)
redis.call('SET', mark, 'r' .. reason, 'EX', ttl)
redis.call('ZADD', index, string.format('%.0f', score), job)
redis.call('ZREMRANGEBYSCORE', index, '-inf', string.format('%.0f', now - tonumber(ttl) * 1000))
redis.call('EXPIRE', index, ttl)
return 2
