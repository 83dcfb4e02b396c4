"""Adding jobs: the producer, the windows that it collects jobs into, and the chain that makes resends safe."""
