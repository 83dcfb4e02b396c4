-- Acknowledges and deletes entries on servers without XACKDEL, so that a cut cannot come between the two.
--
-- KEYS  1 stream
-- ARGV  1 group, then entry ids
-- Reply number acknowledged

--@include lib/ack_and_delete.lua

return ack_and_delete(KEYS[1], ARGV[1], {unpack(ARGV, 2)}, false)
