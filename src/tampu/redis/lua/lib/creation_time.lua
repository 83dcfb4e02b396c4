-- The kinds of MessagePack values, by their first byte: those that begin with a length, and its width; and those of a
-- fixed size.
local LENGTH_WIDTHS = {
  [0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xc7] = 1, [0xc8] = 2, [0xc9] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4,
  [0xdc] = 2, [0xdd] = 4, [0xde] = 2, [0xdf] = 4,
}
local FIXED_SIZES = {
  [0xca] = 4, [0xcb] = 8, [0xcc] = 1, [0xcd] = 2, [0xce] = 4, [0xcf] = 8, [0xd0] = 1, [0xd1] = 2, [0xd2] = 4,
  [0xd3] = 8, [0xd4] = 2, [0xd5] = 3, [0xd6] = 5, [0xd7] = 9, [0xd8] = 17,
}
local function read_number(text, at, width)
  return at + width - 1 <= #text and struct.unpack('>I' .. width, text, at)
end

-- Returns the creation time (ms, as text) of an envelope whose payload begins at `at`; '0' if it cannot be read. The time
-- follows the payload, which may be any value: it is skipped, not decoded. Returns nil if the payload has too many values:
-- one of 1 MB would block the server for a tenth of a second.
local MAX_VALUES = 10000
local function creation_time(envelope, at)
  local values, skipped = 1, 0
  while values > 0 do
    skipped = skipped + 1
    if skipped > MAX_VALUES then
      return nil
    end
    local kind = string.byte(envelope, at)
    if not kind then
      return '0'
    end
    values, at = values - 1, at + 1
    local width = LENGTH_WIDTHS[kind]
    if width then
      local length = read_number(envelope, at, width)
      if not length then
        return '0'
      end
      at = at + width
      if kind >= 0xde then
        values = values + 2 * length
      elseif kind >= 0xdc then
        values = values + length
      else
        at = at + length + ((kind >= 0xc7 and kind <= 0xc9) and 1 or 0)
      end
    elseif kind >= 0xa0 and kind <= 0xbf then
      at = at + kind - 0xa0
    elseif kind >= 0x90 and kind <= 0x9f then
      values = values + kind - 0x90
    elseif kind >= 0x80 and kind <= 0x8f then
      values = values + 2 * (kind - 0x80)
    else
      at = at + (FIXED_SIZES[kind] or 0)
    end
  end
  local kind = string.byte(envelope, at) or 0xc0
  local time = kind < 0x80 and kind
  if kind >= 0xcc and kind <= 0xcf then
    time = read_number(envelope, at + 1, FIXED_SIZES[kind])
  end
  return string.format('%.0f', time or 0)
end
