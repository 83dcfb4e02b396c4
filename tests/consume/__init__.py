"""The Consumer on real servers: what it writes, what it survives; no job is lost, or run twice without cause."""
