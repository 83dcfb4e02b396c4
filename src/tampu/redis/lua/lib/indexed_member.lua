-- Returns the member of the delayed set that the value of an index key (didx) leads to: itself, or, if it is a number,
-- the member with this score and job id. A false value if there is none, or it is one of over 1000 with the same score.
local function indexed_member(delayed, value, id)
  if not value or string.find(value, '[^0-9]') then
    return value
  end
  for _, member in ipairs(redis.pcall('ZRANGEBYSCORE', delayed, value, value, 'LIMIT', 0, 1000)) do
    if string.find(member, id, 1, true) and job_id(string.sub(member, 5 + struct.unpack('<I4', member))) == id then
      return member
    end
  end
  return false
end
