-- Wakes the promoter if jobs that this script has delayed are due before all others. Call `note_delayed` for each of
-- them, then `announce`. Errors are ignored: without a wake-up the promoter finds the jobs when it polls.
local first_due, first_count
local function note_delayed(due)
  if not first_due or due < first_due then
    first_due, first_count = due, 1
  elseif due == first_due then
    first_count = first_count + 1
  end
end
local function announce(delayed, wake)
  local score = first_due and string.format('%.0f', first_due)
  if score and redis.pcall('ZCOUNT', delayed, '-inf', score) == first_count then
    redis.pcall('XADD', wake, 'MAXLEN', 1, '*', 'due', score)
    redis.pcall('EXPIRE', wake, 3600)
  end
end
