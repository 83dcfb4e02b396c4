-- What the promoter has to do: the members that are due, by this server's clock, and when the next one is.
--
-- KEYS  1 delayed set
-- ARGV  1 most members
-- Reply {now in ms, depth, score of the earliest member or '', due members}

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local earliest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local members = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])
return {string.format('%.0f', now), redis.call('ZCARD', KEYS[1]), earliest[2] or '', members}
