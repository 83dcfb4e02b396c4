-- Appends a job to a stream: d is its envelope, n its name, left out if it is empty.
-- `call` is redis.call, which raises an error, or redis.pcall, which returns it as a table.
local function append_entry(call, stream, envelope, name)
  if name == '' then
    return call('XADD', stream, '*', 'd', envelope)
  end
  return call('XADD', stream, '*', 'd', envelope, 'n', name)
end
