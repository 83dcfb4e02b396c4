-- Returns whether a reply of redis.pcall is an error, and stores its text in `failure`.
local failure = ''
local function failed(reply)
  if type(reply) == 'table' and reply.err then
    failure = reply.err
    return true
  end
  return false
end
