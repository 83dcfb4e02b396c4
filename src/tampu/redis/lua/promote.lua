-- Moves due jobs from the delayed set into the stream, each exactly once, even with several promoters: it adds a page of
-- them first and removes it afterwards. Members that are not jobs become dead letters.
--
-- KEYS  1 delayed set, 2 stream, 3 dlq, 4 events, 5 due times; the index keys of the jobs have the same tag
-- ARGV  1 maximum number of members, 2 their maximum total size in bytes (a single one may be larger), 3 maximum length
--       of the stream, 4 events to keep (0: no events), 5 dead letters to keep, 6 prefix of the index keys (didx)
-- Reply {now in ms, members left, score of the earliest or '', promoted, buried, 1 if the stream is full, error}: buried
--       is the number of dead letters; error is why a member could not become one ('' otherwise)

--@include lib/append_entry.lua
--@include lib/creation_time.lua
--@include lib/due_time.lua
--@include lib/emit_event.lua
--@include lib/failed.lua
--@include lib/job_id.lua
--@include lib/now_ms.lua

local PAGE = 32
local call, pcall = redis.call, redis.pcall
local delayed, stream, dlq, events, due_times = unpack(KEYS)
local bytes, keep_events, has_events = tonumber(ARGV[2]), ARGV[4], ARGV[4] ~= '0'
local now = string.format('%.0f', now_ms())
local promoted, buried, full, refusal = 0, 0, 0, nil

local function report()
  local earliest = call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
  return {now, call('ZCARD', delayed), earliest[2] or '', promoted, buried, full, failure}
end

-- Nearly always nothing is due. Then nothing else is read, and nothing written: the server may refuse writes.
local to_go = math.min(tonumber(ARGV[1]), call('ZCOUNT', delayed, '-inf', now))
if to_go == 0 then
  return report()
end
local room = tonumber(ARGV[3]) - call('XLEN', stream)

-- If an ACL forbids ZREM, fail here: after the first job was added, each retry would add it again. Also, at maxmemory a
-- script may continue after a write that needs no memory, such as ZREM; that is fine, as a move frees what it uses.
call('ZREM', delayed, 'no such member')

-- Returns whether a text is valid UTF-8: it is if no byte from 0x80 on is left when all valid sequences are replaced.
local UTF8_SEQUENCES = {
  '[\194-\223][\128-\191]',
  '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
  '\244[\128-\143][\128-\191][\128-\191]',
}
local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then
    return true
  end
  for _, sequence in ipairs(UTF8_SEQUENCES) do
    text = string.gsub(text, sequence, '.')
  end
  return not string.find(text, '[\128-\255]')
end

-- Returns why a member is not a job, or nil and the size of its name.
local function fault_of(member)
  local length = #member
  if length < 4 then
    return 'a delayed member must start with 4 bytes of length; got only ' .. length .. ' bytes'
  end
  local size = struct.unpack('<I4', member)
  if 4 + size > length then
    return string.format('a delayed member of %d bytes claims a name of %.0f bytes', length, size)
  elseif not is_utf8(string.sub(member, 5, 4 + size)) then
    return "a delayed member's name is not UTF-8"
  end
  return nil, size
end

local function bury(member, fault)
  local reply = pcall('XADD', dlq, 'MAXLEN', '~', ARGV[5], '*', 'd', member, 'source_id', '', 'reason', 'malformed',
    'detail', fault, 'ts', now)
  if failed(reply) then
    return false
  end
  if has_events then
    emit_event(events, keep_events, 'dlq', '', now, '', 'attempt', '0', 'reason', 'malformed')
  end
  return true
end

local ids, fields, moved = {}, {}, {}

-- Returns whether the job was added.
local function promote(member, size)
  local name, envelope = string.sub(member, 5, 4 + size), string.sub(member, 5 + size)
  local reply = append_entry(pcall, stream, envelope, name)
  if type(reply) == 'table' then
    refusal = reply
    return false
  end
  promoted = promoted + 1
  local id, payload_at = job_id(envelope)
  ids[promoted], fields[promoted], moved[promoted] = id or '', due_field(id or ''), member
  if has_events then
    local created = '0'
    if id and is_utf8(id) then
      created = creation_time(envelope, payload_at)
    else
      id = ''
    end
    if created then
      emit_event(events, keep_events, 'waiting', id, now, name, 'created_at_ms', created)
    else
      emit_event(events, keep_events, 'waiting', id, now, name)
    end
  end
  return true
end

local handled, stuck, is_over = 0, 0, false  -- stuck: members that can neither run nor become dead letters
while handled < to_go and not is_over do
  local page = call('ZRANGE', delayed, stuck, stuck + math.min(PAGE, to_go - handled) - 1)
  local gone = {}
  for _, member in ipairs(page) do
    local fault, size = fault_of(member)
    if handled > 0 and #member > bytes then
      is_over = true
    elseif fault then
      if bury(member, fault) then
        buried = buried + 1
        gone[#gone + 1] = member
      else
        stuck = stuck + 1
      end
    elseif promoted >= room then
      full, is_over = 1, true
    elseif promote(member, size) then
      gone[#gone + 1] = member
    else
      is_over = true
    end
    if is_over then
      break
    end
    handled, bytes = handled + 1, bytes - #member
  end
  if #gone > 0 then
    call('ZREM', delayed, unpack(gone))
  end
end
if refusal and promoted == 0 then
  return refusal
end

-- Delete the due times and index keys of the jobs. Errors are ignored: what is left expires, and is harmless until then.
if promoted > 0 and pcall('HDEL', due_times, unpack(fields)) ~= promoted then
  -- Some have index keys instead. A job with the same id may have been delayed again in the meantime: keep its index.
  local index_keys, stale = {}, {}
  for i, id in ipairs(ids) do
    index_keys[i] = ARGV[6] .. id
  end
  for i, member in pairs(pcall('MGET', unpack(index_keys))) do
    if member == moved[i] then
      stale[#stale + 1] = index_keys[i]
    end
  end
  if #stale > 0 then
    pcall('DEL', unpack(stale))
  end
end

return report()
