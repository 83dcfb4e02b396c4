-- What the promoter has to do: the members that are due, by this server's clock, and when the next one is.
--
-- KEYS  1 delayed set
-- ARGV  1 most members, 2 most bytes of them (a single one may be larger)
-- Reply {now in ms, depth, score of the earliest member or '', due members}

local PAGE = 32
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local earliest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local most, room = tonumber(ARGV[1]), tonumber(ARGV[2])
local members = {}
-- In pages, so that large members beyond the limit are not even read.
repeat
  local size = math.min(PAGE, most - #members)
  local page = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', #members, size)
  for _, member in ipairs(page) do
    if #members > 0 and #member > room then
      return {now, redis.call('ZCARD', KEYS[1]), earliest[2], members}
    end
    members[#members + 1] = member
    room = room - #member
  end
until #page < PAGE or #members >= most
return {now, redis.call('ZCARD', KEYS[1]), earliest[2] or '', members}
