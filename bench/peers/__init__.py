"""One program for each peer, run in the peer's own environment: see `bench/program/driver.py` for how it is asked.

Each says its settings itself, those its makers document for throughput.
"""
