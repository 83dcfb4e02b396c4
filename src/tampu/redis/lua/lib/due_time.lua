-- The hash of due times maps the last 10 characters of a job id, which are random, to six bytes: the due time (ms). With
-- the whole id and the time as text, an entry would take 72 bytes instead of 49. Of two jobs with the same field one is
-- searched for.
local function due_field(job)
  return string.sub(job, -10)
end
local function pack_due(due)
  return struct.pack('>I6', due)
end
local function unpack_due(value)
  return value and #value == 6 and struct.unpack('>I6', value) or 0
end
