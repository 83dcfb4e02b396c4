-- Returns the job id of an envelope, the first item of a MessagePack array, and the position behind it; nil if it cannot
-- be read.
local function job_id(envelope)
  local head, at = string.byte(envelope, 1), 2
  if head == 0xdc then
    at = 4
  elseif not head or head < 0x91 or head > 0x9f then
    return nil
  end
  local kind, size = string.byte(envelope, at), nil
  if not kind then
    return nil
  elseif kind >= 0xa0 and kind <= 0xbf then
    size, at = kind - 0xa0, at + 1
  elseif kind == 0xd9 and #envelope > at then
    size, at = string.byte(envelope, at + 1), at + 2
  elseif kind == 0xda and #envelope > at + 1 then
    size, at = struct.unpack('>I2', string.sub(envelope, at + 1, at + 2)), at + 3
  else
    return nil
  end
  return string.sub(envelope, at, at + size - 1), at + size
end
