-- Returns the members of the delayed set that are due by the server's clock, and when the earliest one is due.
--
-- KEYS  1 delayed set
-- ARGV  1 maximum number of members, 2 their maximum total size in bytes (a single one may be larger)
-- Reply {now in ms, depth, score of the earliest member or '', due members}

--@include lib/now_ms.lua

local PAGE = 32
local now = string.format('%.0f', now_ms())
local earliest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local most = math.min(tonumber(ARGV[1]), redis.call('ZCOUNT', KEYS[1], '-inf', now))
local room = tonumber(ARGV[2])
local members, count, is_over = {}, 0, false
-- Read in pages, so that large members beyond the limit are not read at all. By rank: by score, each page would have to
-- skip all those before it.
while count < most and not is_over do
  local page = redis.call('ZRANGE', KEYS[1], count, math.min(count + PAGE, most) - 1)
  for _, member in ipairs(page) do
    if count > 0 and #member > room then
      is_over = true
      break
    end
    count = count + 1
    members[count] = member
    room = room - #member
  end
end
return {now, redis.call('ZCARD', KEYS[1]), earliest[2] or '', members}
