"""One program per peer, run in the peer's own environment; `bench/program/driver.py` describes the protocol.

Each program reports its settings, which are those that the peer's authors document for throughput.
"""
