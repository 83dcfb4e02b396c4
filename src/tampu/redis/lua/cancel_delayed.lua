-- Cancels a delayed job. If the promoter removes the member first, the job runs.
--
-- KEYS  1 delayed set, 2 didx, 3 dlid
-- ARGV  1 the exact member, or '' to read it from the index, 2 job id
-- Reply 1 cancelled, 0 not delayed (any more), -1 no index: find the member and call again with it

--@include lib/job_id.lua
--@include lib/indexed_member.lua

local member = ARGV[1]
if member == '' then
  member = indexed_member(KEYS[1], redis.call('GET', KEYS[2]), ARGV[2])
  if not member then
    return -1
  end
end
if redis.call('ZREM', KEYS[1], member) == 0 then
  return ARGV[1] == '' and -1 or 0
end
redis.call('DEL', KEYS[2], KEYS[3])
return 1
