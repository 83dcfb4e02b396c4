-- Delivers jobs of a limited queue: frees the slots of settled jobs, indexes new entries, and claims for this consumer
-- those that may run now, in fair order of their keys. The first call closes the group for XREADGROUP: it sets its last
-- delivered id to the maximum.
--
-- KEYS  see lib/gate.lua
-- ARGV  1 group, 2 consumer, 3 entries wanted, 4 entries to index at most, 5 id of the bell's entry that was read, or '',
--       then pairs: 'f' and an entry that was settled for good, 'r' and one whose job returns (a retry), 'p' and the
--       state (':' .. key or ';' .. task) of a changed limit, 'h' and 'ms state': let a key rest
-- Reply {entries, more, wait, behind, seen}: as of XREADGROUP; 1 if more could be taken now; ms until a key or task has
--       cooled, '' for none, or if more could be taken now; 1 if entries are left to index; the last indexed one. {} if the
--       queue has no limits

--@include lib/job_id.lua
--@include lib/gate.lua

local group, consumer, want, to_index = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if not has_limits then
  return {}
end
local pending, delivered = group_of(group)
queue.running = pending
if is_cleared and call('XLEN', stream) == pending then
  -- The limits were cleared, and nothing waits: XREADGROUP delivers again.
  local info = call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      call('XGROUP', 'SETID', stream, group, info[i + 1])
    end
  end
  call('DEL', gate, line, turn, cool, parked, slots, limits)
  call('EXPIRE', bell, 3600)  -- workers may still wait for it
  return {}
end
if delivered ~= CLOSED then
  -- What runs already counts for the queue's limit at once; mend.lua books it under its keys.
  seen = delivered
  call('XGROUP', 'SETID', stream, group, CLOSED)
elseif not seen then
  -- The gate was deleted: mend.lua indexes again what waits.
  local last = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  seen = last and last[1] or '0-0'
end
if ARGV[5] ~= '' then
  call('XACK', bell, group, ARGV[5])
end
if rung and (ARGV[5] ~= '' or want > 0) then
  rung = false
  call('HSET', gate, 'rung', '0')
end

-- What happened since the last call.
local ids, finals = {}, {}
for i = 6, #ARGV, 2 do
  local kind, value = ARGV[i], ARGV[i + 1]
  if kind == 'f' or kind == 'r' then
    if finals[value] == nil then
      ids[#ids + 1], finals[value] = value, kind == 'f'
    end
  else
    local ms, id = '0', value
    if kind == 'h' then
      ms, id = string.match(value, '^(%d+) (.*)$')
    end
    load({id})
    local state = states[id]
    if kind == 'h' then
      state.rest, dirty[id] = math.max(state.rest, now + ms), true
      call('ZREM', turn, id)
    end
    if state.is_task then
      unpark(state)
    elseif next_of(state.key, 1)[1] then
      place(state)
    end
  end
end
if ids[1] then
  local booked, names = call('HMGET', slots, unpack(ids)), {}
  for _, slot in ipairs(booked) do
    if slot then
      names[#names + 1], names[#names + 2] = slot_states(slot)
    end
  end
  load(names)
  for i, slot in ipairs(booked) do
    if slot then
      free(slot, finals[ids[i]])
    end
  end
  call('HDEL', slots, unpack(ids))
end

-- Index new entries. Their payloads pass through here, so the pages begin small and grow while the entries are small.
local behind, size, bytes = 0, 4, 0
while to_index > 0 do
  local asked = math.min(to_index, size)
  local page = call('XRANGE', stream, '(' .. seen, '+', 'COUNT', asked)
  if page[1] then
    bytes = bytes + index(page)
    seen = page[#page][1]
  end
  to_index = to_index - asked
  if #page < asked then
    break
  end
  size = math.min(2 * size, PAGE)
  if to_index <= 0 or bytes > 131072 then
    behind = 1
    break
  end
end

local cooled = call('ZRANGEBYSCORE', cool, '-inf', string.format('%.3f', now), 'LIMIT', 0, PAGE)
if cooled[1] then
  call('ZREM', cool, unpack(cooled))
  load(cooled)
  for i = 1, #cooled do
    local state = states[cooled[i]]
    if state.is_task then
      unpark(state)
    else
      place(state)
    end
  end
end
write_places('NX')

local taken, booked, left = {}, {}, math.min(want, room(queue))

-- Chooses jobs of a key: up to `most`, and no more of a task than it has room for. Returns the members of `line`, and the
-- task that is at its limit, if the next job is of such a task.
local planned = {}
local function choose(key, found, most)
  local chosen = {}
  for i = 1, math.min(#found, most) do
    local entry, name = entry_of(found[i], key)
    local id = ';' .. name
    if not states[id] then
      load({id})
    end
    local task = states[id]
    if (planned[task] or 0) < room(task) then
      planned[task] = (planned[task] or 0) + 1
      chosen[#chosen + 1] = {entry, found[i], task}
    elseif #call('XRANGE', stream, entry, entry) > 0 then
      return chosen, task
    else
      call('ZREM', line, found[i])  -- deleted: its key must not wait for its task
    end
  end
  return chosen
end

local function book(state)
  local interval = state.limit.interval
  state.running = state.running + 1
  if interval > 0 then
    state.tat = math.max(state.tat, now) + interval
  end
end

-- A page of keys whose turn it is. Pages are bounded: keys whose limits changed, or whose tasks are at their limits, give
-- no jobs.
local function take_page()
  local page = call('ZRANGE', turn, 0, math.min(math.max(left, 8), PAGE) - 1, 'WITHSCORES')
  local count = #page / 2
  local names = {}
  for i = 1, count do
    names[i] = page[2 * i - 1]
  end
  load(names)
  local share, to_go = math.max(1, math.floor(left / math.max(count, 1))), left
  local claim, members, of, again, leaving = {}, {}, {}, {}, {}
  planned = {}
  for i = 1, count do
    local state = states[names[i]]
    local limit = state.limit
    local most = math.min(math.max(1, math.floor(share * limit.weight)), to_go, room(state))
    if state.rest > now or limit.ordered and state.hold ~= '' then
      most = 0
    end
    recall(state)
    v = math.max(v, page[2 * i])
    state.tag, dirty[state.id] = math.max(state.tag, page[2 * i]), true
    local found = most > 0 and next_of(state.key, most + 1) or {}
    local chosen, blocking = choose(state.key, found, most)
    for _, one in ipairs(chosen) do
      claim[#claim + 1], members[#members + 1], of[one[1]] = one[1], one[2], {state, one[3]}
    end
    if blocking then
      leaving[#leaving + 1] = state.id
      again[#again + 1] = {state, blocking}
    elseif most <= 0 or #found > most then
      again[#again + 1] = {state}
    else
      leaving[#leaving + 1] = state.id
    end
    to_go = to_go - #chosen
    if to_go == 0 then
      break
    end
  end
  if claim[1] then
    call('ZREM', line, unpack(members))
    local last = #claim
    claim[last + 1], claim[last + 2], claim[last + 3] = 'RETRYCOUNT', '1', 'FORCE'
    for _, entry in ipairs(call('XCLAIM', stream, group, consumer, 0, unpack(claim))) do
      local state, task = unpack(entry and of[entry[1]] or {})  -- entries that were deleted are left out
      if state then
        taken[#taken + 1] = entry
        booked[#booked + 1], booked[#booked + 2] = entry[1], state.key .. '\0' .. task.key
        state.tag = state.tag + 1 / state.limit.weight
        book(queue)
        book(state)
        book(task)
        dirty[task.id] = true
        if state.limit.ordered then
          local _, _, envelope = key_of(entry)
          state.hold = job_id(envelope) or ''
        end
        left = left - 1
      end
    end
  end
  for _, one in ipairs(again) do
    if one[2] then
      park(one[1], one[2])
    elseif not place(one[1]) then
      leaving[#leaving + 1] = one[1].id
    end
  end
  for task in pairs(planned) do
    if task.limit.interval > 0 and task.running < task.limit.most and room(task) <= 0 then
      wake_at(task, opens_at(task))
    end
  end
  if leaving[1] then
    call('ZREM', turn, unpack(leaving))
  end
  write_places('XX')
  return count > 0
end
for _ = 1, 16 do
  if left <= 0 or not take_page() then
    break
  end
end
if booked[1] then
  call('HSET', slots, unpack(booked))
end
write_states()

local is_more, wait = ring(), ''
if not is_more then
  local first = tonumber(call('ZRANGE', cool, 0, 0, 'WITHSCORES')[2])
  local queue_at = opens_at(queue)
  if queue_at > now and call('ZCARD', turn) > 0 then
    first = math.min(first or math.huge, queue_at)
  end
  wait = first and string.format('%.0f', math.max(math.ceil(first - now), 0)) or ''
end
return {taken, is_more and 1 or 0, wait, behind, seen}
