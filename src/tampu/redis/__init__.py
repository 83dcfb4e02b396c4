"""Everything that talks to a server: connections, discovery, errors, and one function per script."""
