-- Deletes waiting and delayed jobs, and what is stored by their ids, so that the ids can be used again.
--
-- Delivered entries are kept: only entries after the last one delivered to any group are deleted. Of a limited queue,
-- whose group is closed (take.lua), those that are not pending. Jobs that are added in the meantime are kept too: the
-- first call determines how far the next calls go.
--
-- KEYS  1 stream, 2 delayed set, 3 due times; the keys of the ids start with the same tag, so they are in the same slot
-- ARGV  1 tag, 2 maximum of each kind per call, 3 delayed jobs left to delete (-1: all that exist now), 4 last entry to
--       delete ('+': the last that exists now, '': none)
-- Reply {deleted, delayed jobs left to delete, last entry to delete ('' if none is left)}

--@include lib/due_time.lua
--@include lib/job_id.lua

local stream, delayed, due = unpack(KEYS)
local tag, most, delayed_to_go, last = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

local CLOSED = '18446744073709551615-18446744073709551615'
local deleted = 0
if delayed_to_go < 0 then
  delayed_to_go = redis.call('ZCARD', delayed)
end
if delayed_to_go > 0 then
  local members = redis.call('ZRANGE', delayed, 0, math.min(delayed_to_go, most) - 1)
  for _, member in ipairs(members) do
    local size = #member >= 4 and struct.unpack('<I4', member) or 0
    local id = job_id(string.sub(member, 5 + size))
    -- If another member has the same id and is the one that its keys lead to, keep them.
    local is_led_to = id and (redis.call('GET', tag .. ':didx:' .. id) == member
      or unpack_due(redis.call('HGET', due, due_field(id))) == tonumber(redis.call('ZSCORE', delayed, member)))
    if is_led_to then
      redis.call('DEL', tag .. ':didx:' .. id, tag .. ':dlid:' .. id)
      redis.call('HDEL', due, due_field(id))
    end
    deleted = deleted + redis.call('ZREM', delayed, member)
  end
  delayed_to_go = #members > 0 and delayed_to_go - #members or 0
end

local function number(id)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  return tonumber(ms), tonumber(seq)
end

if last ~= '' then
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then
    return {deleted, delayed_to_go, ''}
  end
  local from, last_ms, last_seq, held, closed = '-', -1, -1, 0, {}
  for _, flat in ipairs(groups) do
    local group = {}
    for i = 1, #flat, 2 do
      group[flat[i]] = flat[i + 1]
      if flat[i] == 'last-delivered-id' and flat[i + 1] == CLOSED then
        closed[#closed + 1], held = group.name, held + group.pending
      elseif flat[i] == 'last-delivered-id' then
        local ms, seq = number(flat[i + 1])
        if ms > last_ms or ms == last_ms and seq > last_seq then
          last_ms, last_seq = ms, seq
          from = '(' .. flat[i + 1]
        end
      end
    end
  end
  if last == '+' then
    local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
    last = newest[1] and newest[1][1] or ''
  end
  local entries = last ~= '' and redis.call('XRANGE', stream, from, last, 'COUNT', most + held) or {}
  local ids, markers = {}, {}
  for _, entry in ipairs(entries) do
    local is_held = false
    for _, group in ipairs(closed) do
      is_held = is_held or #redis.call('XPENDING', stream, group, entry[1], entry[1], 1) > 0
    end
    if not is_held then
      ids[#ids + 1] = entry[1]
    end
    for at = 1, is_held and 0 or #entry[2], 2 do
      local id = entry[2][at] == 'd' and job_id(entry[2][at + 1])
      if id then
        markers[#markers + 1] = tag .. ':dlid:' .. id
      end
    end
  end
  if #ids > 0 then
    deleted = deleted + redis.call('XDEL', stream, unpack(ids))
  end
  if #markers > 0 then
    redis.call('DEL', unpack(markers))
  end
  if #entries < most + held then
    last = ''
  end
end
return {deleted, delayed_to_go, last}
