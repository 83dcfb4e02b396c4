-- Tells whether a reply of redis.pcall is an error, and keeps the text of the last one in `failure`.
local failure = ''
local function failed(reply)
  if type(reply) == 'table' and reply.err then
    failure = reply.err
    return true
  end
  return false
end
