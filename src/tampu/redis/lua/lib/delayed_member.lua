-- Returns a job as a member of the delayed set: the length of its name, its name, its envelope.
local function delayed_member(name, envelope)
  return struct.pack('<I4', #name) .. name .. envelope
end
