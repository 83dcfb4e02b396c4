-- Acknowledges and deletes entries atomically on servers without XACKDEL: a lost connection cannot separate the two.
--
-- KEYS  1 stream
-- ARGV  1 group, then entry ids
-- Reply number of acknowledged entries

--@include lib/ack_and_delete.lua

return ack_and_delete(KEYS[1], ARGV[1], {unpack(ARGV, 2)}, false)
