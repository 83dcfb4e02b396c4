"""The Consumer on real servers: what it writes and which faults it survives without losing or repeating jobs."""
