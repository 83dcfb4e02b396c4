-- Compares the gate of a limited queue with the stream, page by page, and repairs it: entries that were settled, deleted or
-- delivered without the gate's knowledge, limits that changed, keys that are idle. Run it round and round: one page a
-- second, or page after page after a change of the limits. It has nothing to do while all workers are current and none dies.
--
-- KEYS  see lib/gate.lua; 10 due times
-- ARGV  1 group, 2 entries per page, 3 prefix of the index keys (didx), 4 to 8 cursors: of the pending entries, slots, keys
--       that wait, states, and the stream; '' to begin
-- Reply {the five cursors, number of repairs}; {} if the queue has no limits

--@include lib/job_id.lua
--@include lib/gate.lua

local group, page, due, repaired = ARGV[1], tonumber(ARGV[2]), KEYS[10], 0
local at_pending, at_slots, at_key, at_state, at_stream = unpack(ARGV, 4, 8)
if not has_limits then
  return {}
end
queue.running = group_of(group)
local function is_pending(id)
  return #call('XPENDING', stream, group, id, id, 1) > 0
end
local function after(id)
  return id == '' and '-' or '(' .. id
end

-- Pending entries without a slot: they ran before the queue had limits, or were delivered by others.
local pending, ids = call('XPENDING', stream, group, after(at_pending), '+', page), {}
for i, one in ipairs(pending) do
  ids[i] = one[1]
end
for i, slot in ipairs(ids[1] and call('HMGET', slots, unpack(ids)) or {}) do
  local entry = not slot and call('XRANGE', stream, ids[i], ids[i])[1]
  if entry then
    local key, task = key_of(entry)
    for _, id in ipairs({':' .. key, ';' .. task}) do
      load({id})
      states[id].running, dirty[id] = states[id].running + 1, true
    end
    call('HSET', slots, ids[i], key .. '\0' .. task)
    repaired = repaired + 1
  end
end
at_pending = #pending == page and ids[page] or ''

-- Slots of entries that are no longer pending.
if at_slots ~= '' or call('HLEN', slots) ~= queue.running then
  local scan = call('HSCAN', slots, at_slots == '' and '0' or at_slots, 'COUNT', page)
  for i = 1, #scan[2], 2 do
    if not is_pending(scan[2][i]) and call('HDEL', slots, scan[2][i]) == 1 then
      free(scan[2][i + 1], false)
      repaired = repaired + 1
    end
  end
  at_slots = scan[1] == '0' and '' or scan[1]
end

-- Keys that wait, in order. Entries that were deleted are taken off their line.
for step = 1, page do
  local from = at_key == '' and '-' or '(' .. string.sub(at_key, 2) .. '\1'
  local first = call('ZRANGEBYLEX', line, from, '+', 'LIMIT', 0, 1)[1]
  if not first then
    at_key = ''
    break
  end
  local key = string.sub(first, 1, string.find(first, '\0', 1, true) - 1)
  local id = entry_of(first, key)
  if #call('XRANGE', stream, id, id) == 0 then
    call('ZREM', line, first)
    repaired = repaired + 1
  else
    load({':' .. key})
    recall(states[':' .. key])
    place(states[':' .. key])
    at_key = '=' .. key
  end
end

-- States of idle keys, and ordered keys that wait for a job that is gone.
local behind = seen and #call('XRANGE', stream, '(' .. seen, '+', 'COUNT', 1) > 0
local scan = call('HSCAN', gate, at_state == '' and '0' or at_state, 'COUNT', page)
for i = 1, #scan[2], 2 do
  local id = scan[2][i]
  if string.find(id, '^[:;]') then
    load({id})
    local state = states[id]
    dirty[id] = true
    if state.hold ~= '' and state.running == 0 and not behind
      and call('HEXISTS', due, string.sub(state.hold, -10)) == 0 and call('EXISTS', ARGV[3] .. state.hold) == 0 then
      state.hold = ''
      repaired = repaired + 1
      if next_of(state.key, 1)[1] then
        place(state)
      end
    end
    if state.is_task then
      unpark(state)
    elseif state.running == 0 and state.hold == '' and math.max(state.tat, state.rest) <= now
      and not next_of(state.key, 1)[1] then
      state.tag = 0
    end
  end
end
at_state = scan[1] == '0' and '' or scan[1]

-- Entries that are neither pending nor on a line: the gate was deleted, or a consumer with its pending entries.
if at_stream ~= '' or not behind and call('XLEN', stream) > queue.running + call('ZCARD', line) then
  local entries, lost = call('XRANGE', stream, after(at_stream), seen or '+', 'COUNT', page), {}
  for _, entry in ipairs(entries) do
    local key, task = key_of(entry)
    if not call('ZSCORE', line, member_of(key, '1', entry[1], task)) and not is_pending(entry[1])
      and not call('ZSCORE', line, member_of(key, '0', entry[1], task)) then
      lost[#lost + 1] = entry
    end
  end
  index(lost)
  repaired = repaired + #lost
  at_stream = #entries == page and entries[page][1] or ''
end

write_places('NX')
if seen then
  write_states()
end
rung = false
ring()
return {at_pending, at_slots, at_key, at_state, at_stream, repaired}
