-- Adds a chunk of jobs from Spark, once, however often its task, micro-batch or stage is run again.
--
-- KEYS  1 marker of the chunk's partition, 2 stream, 3 delayed set, 4 wake stream, 5 due times; then the keys of each job
--       by its kind: dlid, cancel mark, didx
-- ARGV  1 number of the chunk in its partition, from 0 (-1: no marker)   2 its digest   3 TTL of markers, seconds
--       4 maximum length of the stream   5 number of jobs
--       6 'same': all jobs run now, under one name: 7 that name, then their envelopes
--         'each': then per job: kind, name, envelope, and for the delayed kinds when it is due (epoch ms)
-- Kinds n: now; i: now, explicit id (keys dlid, cancel mark); d: delayed; e: delayed, explicit id (all three keys).
--
-- Reply {'ok', added, duplicates}
--       {'done'}: this chunk was added before
--       {'differs'}: another chunk with this number was added before; nothing was written
--       {'gap', last}: a chunk before this one is missing; nothing was written
--       {'full', length}: nothing was written, try again later
--
-- Everything that can fail is checked before the first write: nothing may raise after it, or a resend would add the
-- first jobs of the chunk again.

--@include lib/due_time.lua
--@include lib/announce.lua
--@include lib/append_entry.lua
--@include lib/delayed_member.lua
--@include lib/job_id.lua
--@include lib/now_ms.lua

local marker, stream, delayed, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local number, ttl, cap, total = tonumber(ARGV[1]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

if number >= 0 then
  local found = redis.call('HGET', marker, number)
  if found then
    redis.call('EXPIRE', marker, ttl)
    return {found == ARGV[2] and 'done' or 'differs'}
  end
  if number > 0 and redis.call('HEXISTS', marker, number - 1) == 0 then
    return {'gap', redis.call('HLEN', marker) - 1}
  end
end

local length = redis.call('XLEN', stream)  -- raises if the key is not a stream
redis.call('ZCARD', delayed)
local are_same = ARGV[6] == 'same'

local function count_those_for_now()
  local count, at = 0, 7
  for _ = 1, total do
    local is_delayed = ARGV[at] == 'd' or ARGV[at] == 'e'
    count = count + (is_delayed and 0 or 1)
    at = at + (is_delayed and 4 or 3)
  end
  return count
end

-- A full stream holds back the delayed jobs of a chunk, too. A chunk larger than the maximum is added to an empty
-- stream, or it would wait forever.
if length > 0 and length + (are_same and total or count_those_for_now()) > cap then
  return {'full', length}
end

local call = redis.call
local function add_each()
  local now = now_ms()
  local added, at, key = 0, 7, 6
  for _ = 1, total do
    local kind, name, envelope = ARGV[at], ARGV[at + 1], ARGV[at + 2]
    at = at + 3
    local due
    if kind == 'd' or kind == 'e' then
      due = tonumber(ARGV[at])
      at = at + 1
    end
    local seconds = due and math.max(1, math.floor((due - now) / 1000)) or 0
    local is_new = true
    if kind == 'i' or kind == 'e' then
      is_new = call('SET', KEYS[key], '1', 'NX', 'EX', seconds + tonumber(ttl))
      if is_new then  -- a request to cancel an earlier job of that id must not cancel this one
        call('DEL', KEYS[key + 1])
      end
      key = key + 2
    end
    local index
    if kind == 'e' then
      index = KEYS[key]
      key = key + 1
    end
    if is_new then
      added = added + 1
      if due and due > now then
        local member = delayed_member(name, envelope)
        call('ZADD', delayed, string.format('%.0f', due), member)
        if index then
          call('SET', index, member, 'EX', seconds + 3600)
        end
        note_delayed(due, not index and job_id(envelope))
      else
        append_entry(call, stream, envelope, name)
      end
    end
  end
  announce(delayed, wake, KEYS[5], now)
  return added
end

local added = total
if are_same then
  for place = 8, 7 + total do
    append_entry(call, stream, ARGV[place], ARGV[7])
  end
else
  added = add_each()
end
if number >= 0 then
  redis.call('HSET', marker, number, ARGV[2])
  redis.call('EXPIRE', marker, ttl)
end
return {'ok', added, total - added}
