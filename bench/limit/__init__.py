"""The limit: the same commands from C and from a bare loop, in the same rounds as everybody."""
