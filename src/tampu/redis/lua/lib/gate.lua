-- The state of a limited queue, for take.lua and mend.lua. The stream stays the only place of jobs: `line` indexes the
-- entries that wait, by key; `slots` maps each delivered entry to its key and task.
--
-- KEYS   1 stream, 2 gate, 3 line, 4 turn, 5 cool, 6 parked, 7 slots, 8 limits, 9 bell
-- gate   hash: `seen`, the last indexed entry; `v`, the virtual time; `t`, the queue's theoretical arrival time (GCRA);
--        `rung`; per state, ':' .. key or ';' .. task: four doubles (running, tag, theoretical arrival time, end of its
--        rest), the id of the job that an ordered key waits for, with its length in front, and its member of `parked`
-- line   zset, all scores 0: key NUL rank entry-id task; the rank is '1', or '0' for a job that returns to an ordered key
-- parked zset, all scores 0: task NUL tag state: keys whose next job is of a task that is at its limit
-- slots  hash: entry id to key NUL task
-- limits hash: '' of the queue, '*' of every key, by state those of one key or task, '#' if there are any of those, '!'
--        alone once the limits are cleared. A limit is five doubles: concurrency, ms between two starts (0: no rate),
--        burst, weight, ordered; -1 inherits
-- A key that waits is in `turn` (by virtual time), in `cool` (until its rate allows), parked, or at its limit, or its
-- ordered job is to return: then a freed slot, or that job, puts it back. A task with parked keys is in `cool`, or a
-- freed slot brings them back.
local call = redis.call
local stream, gate, line, turn, cool, parked, slots, limits, bell = unpack(KEYS)
local CLOSED = '18446744073709551615-18446744073709551615'
-- Tokens may be taken this much earlier (ms): timers fire late, and that must not lower the rate.
local EARLY_MS = 50
-- States with high rates cool for at least this long (ms), so that they take several tokens at once.
local BUNDLE_MS = 10
-- A task with more parked keys than it has room for is looked at again after this time (ms): a key may leave it unused.
local AGAIN_MS = 250
local PAGE = 64
local clock = call('TIME')
local now = clock[1] * 1000 + clock[2] / 1000
local function read_limit(text, default)
  if not text or #text ~= 40 then
    return default
  end
  local most, interval, burst, weight, ordered = struct.unpack('<ddddd', text)
  local limit = {
    most = most >= 0 and most or default.most, interval = interval >= 0 and interval or default.interval,
    burst = burst >= 0 and burst or default.burst, weight = weight > 0 and weight or default.weight,
    ordered = ordered == 1 or ordered < 0 and default.ordered, tau = 0,
  }
  if limit.ordered then
    limit.most = math.min(limit.most, 1)
  end
  if limit.interval > 0 then
    limit.tau = (limit.burst - 1) * limit.interval + EARLY_MS
  end
  return limit
end
local NONE = {most = math.huge, interval = 0, burst = 1, weight = 1, ordered = false, tau = 0}
-- A limit may have become faster, or the clock have been set back: never wait longer than the limit explains.
local function bounded(tat, limit)
  return limit.interval > 0 and math.min(tat, now + limit.tau + limit.interval) or 0
end
local meta, general = call('HMGET', gate, 'seen', 'v', 't', 'rung'), call('HMGET', limits, '', '*', '#', '!')
local seen, v, rung = meta[1], tonumber(meta[2] or 0), meta[4] == '1'
local has_own, is_cleared = general[3], general[4]
local has_limits = general[1] or general[2] or has_own or is_cleared
local of_queue, of_key = read_limit(general[1], NONE), read_limit(general[2], NONE)
local queue = {limit = of_queue, running = 0, tat = bounded(tonumber(meta[3] or 0), of_queue)}
-- Loads states and their limits. `dirty` are those to write.
local states, dirty = {}, {}
local function load(ids)
  local wanted = {}
  for i = 1, #ids do
    if not states[ids[i]] then
      states[ids[i]] = true
      wanted[#wanted + 1] = ids[i]
    end
  end
  for from = 1, #wanted, 1000 do
    local to = math.min(from + 999, #wanted)
    local values = call('HMGET', gate, unpack(wanted, from, to))
    local texts = has_own and call('HMGET', limits, unpack(wanted, from, to)) or {}
    for i = from, to do
      local id, value = wanted[i], values[i - from + 1]
      local is_task = string.byte(id) == 59
      local limit = read_limit(texts[i - from + 1], is_task and NONE or of_key)
      local state = {id = id, key = string.sub(id, 2), is_task = is_task, limit = limit}
      state.running, state.tag, state.tat, state.rest, state.hold, state.parked = 0, 0, 0, 0, '', ''
      if value and #value >= 36 then
        local size
        state.running, state.tag, state.tat, state.rest, size = struct.unpack('<ddddI4', value)
        state.hold, state.parked = string.sub(value, 37, 36 + size), string.sub(value, 37 + size)
        state.tat = bounded(state.tat, limit)
      end
      states[id] = state
    end
  end
end
-- How many jobs may start now.
local function room(state)
  local limit = state.limit
  local left = limit.most - state.running
  if limit.interval > 0 then
    left = math.min(left, math.floor((now + limit.tau - math.max(state.tat, now)) / limit.interval) + 1)
  end
  return left
end
local function opens_at(state)
  local limit = state.limit
  local at = limit.interval > 0 and state.tat - limit.tau or 0
  return (at > now and limit.interval < BUNDLE_MS) and at + BUNDLE_MS or at
end
local function next_of(key, count)
  return call('ZRANGEBYLEX', line, '[' .. key .. '\0', '(' .. key .. '\1', 'LIMIT', 0, count)
end
-- Puts a key that waits, and is not parked, where it belongs. Returns true if it is its turn.
local to_turn, to_cool = {}, {}
local function place(state)
  local limit = state.limit
  if state.running >= limit.most or state.parked ~= '' or limit.ordered and state.hold ~= '' then
    return false
  end
  local at = math.max(opens_at(state), state.rest)
  local places = at <= now and to_turn or to_cool
  places[#places + 1] = at <= now and math.max(v, state.tag) or string.format('%.3f', at)
  places[#places + 1] = state.id
  return at <= now
end
local function recall(state)
  if state.parked ~= '' then
    call('ZREM', parked, state.parked)
    state.parked, dirty[state.id] = '', true
  end
end
local function wake_at(task, at)
  to_cool[#to_cool + 1], to_cool[#to_cool + 2] = string.format('%.3f', at), task.id
end
local function park(state, task)
  recall(state)
  state.parked, dirty[state.id] = task.key .. '\0' .. struct.pack('>d', state.tag) .. state.id, true
  call('ZADD', parked, 0, state.parked)
  if task.running < task.limit.most then
    wake_at(task, math.max(opens_at(task), now + 1))
  end
end
-- Brings back as many parked keys as the task has room for.
local function unpark(task)
  local left, at, ids = math.min(room(task), PAGE), opens_at(task), {}
  local found = call('ZRANGEBYLEX', parked, '[' .. task.key .. '\0', '(' .. task.key .. '\1', 'LIMIT', 0,
    left > 0 and left + 8 or 1)
  for i = 1, left > 0 and #found or 0 do
    ids[i] = string.sub(found[i], #task.key + 10)
  end
  load(ids)
  local used = 0
  while used < #ids and left > 0 do
    used = used + 1
    local state = states[ids[used]]
    recall(state)
    if next_of(state.key, 1)[1] and place(state) then
      left, at = left - 1, math.max(at, now + AGAIN_MS)
    end
  end
  if #found > used and task.running < task.limit.most then
    wake_at(task, at)
  end
end
local function write_places(mode)
  for _, name in ipairs({turn, cool}) do
    local places = name == turn and to_turn or to_cool
    for from = 1, #places, 1000 do
      call('ZADD', name, name == turn and mode or 'CH', unpack(places, from, math.min(from + 999, #places)))
    end
  end
  to_turn, to_cool = {}, {}
end
-- Entry ids as text that sorts as the stream does, and back, with the task behind it.
local function sortable(id)
  local dash = string.find(id, '-', 1, true)
  return string.char(dash) .. string.sub(id, 1, dash - 1) .. string.char(#id - dash) .. string.sub(id, dash + 1)
end
local function entry_of(member, key)
  local at = #key + 3
  local dash = at + string.byte(member, at)
  local last = dash + string.byte(member, dash)
  return string.sub(member, at + 1, dash - 1) .. '-' .. string.sub(member, dash + 1, last), string.sub(member, last + 1)
end
-- The key of a job, its task and its envelope: the key is `k` of the options behind the envelope (wire/extras.py), else
-- the task.
local protect = pcall
local function key_of(entry)
  local flat, envelope, task = entry[2], '', ''
  for i = #flat - 1, 1, -2 do
    if flat[i] == 'd' then
      envelope = flat[i + 1]
    elseif flat[i] == 'n' then
      task = flat[i + 1]
    end
  end
  if #task > 256 or string.find(task, '\0', 1, true) then
    task = ''
  end
  local mark, last = string.byte(envelope, -2, -1)
  if mark == 193 and last == 84 and #envelope > 5 then
    local high, low = string.byte(envelope, -4, -3)
    local is_map, map = protect(cmsgpack.unpack, string.sub(envelope, -4 - high * 256 - low, -5))
    local key = is_map and type(map) == 'table' and map.k
    if type(key) == 'string' and #key <= 256 and not string.find(key, '\0', 1, true) then
      return key, task, envelope
    end
  end
  return task, task, envelope
end
local function member_of(key, rank, id, task)
  return key .. '\0' .. rank .. sortable(id) .. task
end
-- Indexes entries that wait. Returns the bytes of their envelopes.
local function index(entries)
  local keys, ids, tasks, envelopes, members, bytes, placed = {}, {}, {}, {}, {}, 0, {}
  for i = 1, #entries do
    keys[i], tasks[i], envelopes[i] = key_of(entries[i])
    ids[i], bytes = ':' .. keys[i], bytes + #envelopes[i]
  end
  load(ids)
  for i = 1, #entries do
    local state, rank = states[ids[i]], '1'
    if state.hold ~= '' and job_id(envelopes[i]) == state.hold then
      state.hold, rank, dirty[ids[i]] = '', '0', true
      recall(state)
    end
    members[2 * i - 1], members[2 * i], placed[state] = 0, member_of(keys[i], rank, entries[i][1], tasks[i]), true
  end
  if members[1] then
    call('ZADD', line, unpack(members))
  end
  for state in pairs(placed) do
    place(state)
  end
  return bytes
end
-- Frees the slot of an entry. A final outcome also ends the hold of an ordered key.
local function slot_states(slot)
  local at = string.find(slot, '\0', 1, true) or #slot + 1
  return ':' .. string.sub(slot, 1, at - 1), ';' .. string.sub(slot, at + 1)
end
local function free(slot, is_final)
  local id, task_id = slot_states(slot)
  if not (states[id] and states[task_id]) then
    load({id, task_id})
  end
  local state, task = states[id], states[task_id]
  local was_blocked = state.running >= state.limit.most or state.limit.ordered and state.hold ~= ''
  state.running, task.running = math.max(state.running - 1, 0), math.max(task.running - 1, 0)
  dirty[id], dirty[task_id] = true, true
  if is_final then
    state.hold = ''
  end
  -- A key that was not blocked and waits has its place.
  if was_blocked and next_of(state.key, 1)[1] then
    place(state)
  end
  if task.running + 1 >= task.limit.most then
    unpark(task)
  end
end
local function write_states()
  local set, gone = {'v', string.format('%.17g', v), 't', string.format('%.3f', queue.tat), 'seen', seen}, {}
  for id in pairs(dirty) do
    local state = states[id]
    if state.running == 0 and state.hold == '' and state.parked == '' and state.tag <= v
      and state.tat <= now and state.rest <= now then
      gone[#gone + 1] = id
    else
      set[#set + 1] = id
      set[#set + 1] = struct.pack('<ddddI4', state.running, state.tag, state.tat, state.rest, #state.hold) .. state.hold
        .. state.parked
    end
  end
  for from = 1, #set, 1000 do
    call('HSET', gate, unpack(set, from, math.min(from + 999, #set)))
  end
  for from = 1, #gone, 1000 do
    call('HDEL', gate, unpack(gone, from, math.min(from + 999, #gone)))
  end
end
-- Wakes one worker that waits for this queue, unless one was woken since the last `take`. Returns true if more may run.
local function ring()
  local is_more = room(queue) > 0 and call('ZCARD', turn) > 0
  if is_more and not rung then
    call('XADD', bell, 'MAXLEN', 1, '*', 'b', '1')
    call('HSET', gate, 'rung', '1')
  end
  return is_more
end
-- The number of pending entries of a group, and its last delivered id.
local function group_of(name)
  for _, flat in ipairs(call('XINFO', 'GROUPS', stream)) do
    local group = {}
    for i = 1, #flat, 2 do
      group[flat[i]] = flat[i + 1]
    end
    if group.name == name then
      return group.pending, group['last-delivered-id']
    end
  end
  error('NOGROUP No such consumer group ' .. name)
end
