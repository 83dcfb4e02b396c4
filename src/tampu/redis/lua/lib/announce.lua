-- Keeps track of the jobs that this script delays. Call `note_delayed` for each of them, with its id if the job must be
-- found by its id. Then call `announce`, which wakes the promoter if one is due before all others, and stores when each
-- id is due. Errors are ignored: the promoter also polls, and a job whose due time is not stored is searched for.
local first_due, first_count, last_due, due_times = nil, 0, 0, {}
local function note_delayed(due, job)
  if not first_due or due < first_due then
    first_due, first_count = due, 1
  elseif due == first_due then
    first_count = first_count + 1
  end
  if job then
    last_due = math.max(last_due, due)
    due_times[#due_times + 1] = due_field(job)
    due_times[#due_times + 1] = pack_due(due)
  end
end
local function announce(delayed, wake, due, now)
  local score = first_due and string.format('%.0f', first_due)
  if score and redis.pcall('ZCOUNT', delayed, '-inf', score) == first_count then
    redis.pcall('XADD', wake, 'MAXLEN', 1, '*', 'due', score)
    redis.pcall('EXPIRE', wake, 3600)
  end
  if #due_times == 0 then
    return
  end
  redis.pcall('HSET', due, unpack(due_times))
  local ttl, left = math.floor((last_due - now) / 1000) + 3600, redis.pcall('TTL', due)
  if type(left) ~= 'number' or left < ttl then
    redis.pcall('EXPIRE', due, ttl)
  end
  -- Promoters of other implementations leave entries behind. While there are more entries than delayed jobs, drop old
  -- ones, faster than they are added.
  local entries, jobs = redis.pcall('HLEN', due), redis.pcall('ZCOUNT', delayed, '-inf', '+inf')
  if type(entries) == 'number' and type(jobs) == 'number' and entries > jobs then
    local sample = redis.pcall('HRANDFIELD', due, -2 * #due_times, 'WITHVALUES')
    for i = 1, #sample, 2 do
      if unpack_due(sample[i + 1]) < now - 3600000 then
        redis.pcall('HDEL', due, sample[i])
      end
    end
  end
end
