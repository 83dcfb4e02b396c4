-- Appends an event, with extra fields and values, and returns the reply. Errors are returned as a table, not raised: an
-- events key of the wrong type, or one that an ACL forbids, may cost events but never a job.
local function emit_event(events, keep, event, job, ts, name, ...)
  if name == '' then
    return redis.pcall('XADD', events, 'MAXLEN', '~', keep, '*', 'e', event, 'id', job, 'ts', ts, ...)
  end
  return redis.pcall('XADD', events, 'MAXLEN', '~', keep, '*', 'e', event, 'id', job, 'ts', ts, 'n', name, ...)
end
