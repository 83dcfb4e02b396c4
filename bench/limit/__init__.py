"""The limit: the same commands from C and from a bare loop, measured in the same rounds."""
