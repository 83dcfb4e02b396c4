-- Cancels a delayed job. If the promoter removes the member first, the job runs.
--
-- KEYS  1 delayed set, 2 didx, 3 dlid, 4 due times
-- ARGV  1 the exact member, or '' to look it up, 2 job id
-- Reply 1 cancelled, 0 not delayed (any more), -1 not found: search for the member and call again with it

--@include lib/job_id.lua
--@include lib/due_time.lua
--@include lib/find_delayed.lua

local member = ARGV[1]
if member == '' then
  member = find_delayed(KEYS[1], KEYS[2], KEYS[4], ARGV[2])
  if not member then
    return -1
  end
end
if redis.call('ZREM', KEYS[1], member) == 0 then
  return ARGV[1] == '' and -1 or 0
end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HDEL', KEYS[4], due_field(ARGV[2]))
return 1
