-- Returns the reply to a window that is not the next of its chain: it was applied before, or arrived too early.
-- The further arguments are the keys that its jobs are added to.
local function reply_out_of_turn(chain, number, last, ...)
  if tonumber(number) > last then
    if last == 0 and redis.call('EXISTS', ...) == 0 then
      last = -1
    end
    return {'gap', last}
  end
  local of, codes = string.match(redis.call('HGET', chain, 'r' .. number % 8) or '', '^(%d+):(.*)$')
  return {'ok', of == number and codes or '', ''}
end
