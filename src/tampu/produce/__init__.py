"""Adding jobs: the producer, the windows it gathers adds into, and the chain that makes resends harmless."""
