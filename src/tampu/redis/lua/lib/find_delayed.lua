-- Returns the member of a delayed job: the hash of due times leads to it, or its index key (didx) holds it. A false value
-- if it has neither, or if over 1000 jobs are due in the same millisecond.
local function find_delayed(delayed, didx, due, id)
  local due_time = redis.call('HGET', due, due_field(id))
  local score = due_time and string.format('%.0f', unpack_due(due_time))
  for _, member in ipairs(score and redis.pcall('ZRANGEBYSCORE', delayed, score, score, 'LIMIT', 0, 1000) or {}) do
    if string.find(member, id, 1, true) and job_id(string.sub(member, 5 + struct.unpack('<I4', member))) == id then
      return member
    end
  end
  return redis.call('GET', didx)
end
