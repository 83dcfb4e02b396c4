-- Returns the reply to a window that is not the next of its chain: it was applied before, or arrived too early.
local function reply_out_of_turn(chain, number, last)
  if tonumber(number) > last then
    return {'gap', last}
  end
  local of, codes = string.match(redis.call('HGET', chain, 'r' .. number % 8) or '', '^(%d+):(.*)$')
  return {'ok', of == number and codes or '', ''}
end
