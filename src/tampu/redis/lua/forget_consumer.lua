-- Deletes consumer names without pending entries: DELCONSUMER would lose pending ones.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 a consumer's name, or '' for all that have been idle for at least 3 this many ms
-- Reply number of deleted names

local deleted = 0
local groups = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if groups.err then
  return 0
end
for _, flat in ipairs(groups) do
  local consumer = {}
  for i = 1, #flat, 2 do
    consumer[flat[i]] = flat[i + 1]
  end
  local is_meant
  if ARGV[2] ~= '' then
    is_meant = consumer.name == ARGV[2]
  else
    is_meant = consumer.idle >= tonumber(ARGV[3])
  end
  if is_meant and consumer.pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    deleted = deleted + 1
  end
end
return deleted
