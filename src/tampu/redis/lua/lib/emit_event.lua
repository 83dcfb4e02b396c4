-- Appends an event, with further fields and values, and returns the reply. A wrong-typed or forbidden events key costs
-- the events, never a job, so an error is returned as a table.
local function emit_event(events, keep, event, job, ts, name, ...)
  if name == '' then
    return redis.pcall('XADD', events, 'MAXLEN', '~', keep, '*', 'e', event, 'id', job, 'ts', ts, ...)
  end
  return redis.pcall('XADD', events, 'MAXLEN', '~', keep, '*', 'e', event, 'id', job, 'ts', ts, 'n', name, ...)
end
