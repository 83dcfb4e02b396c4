"""Benchmarks: tampu beside everyone, and beside the limit. `make bench`, `make bench-quick`, `make profile`.

| module | role |
|---|---|
| `program/` | what every contestant's program shares: how it is asked, its clock, its payloads |
| `ours/` | our scenarios |
| `peers/` | one program for each peer, run in its own environment |
| `limit/` | the same commands from C (`redis-benchmark`) and from a bare loop |
| `contestants.py` | starts the programs and asks them |
| `plan.py` | who runs what, how often, with how many jobs |
| `bars.py` | the ratios that must hold |
| `runner.py` | rounds that take turns |
| `record.py` | one JSON file per run |
| `report.py` | the page, the plots and the README's table, made from that file |
"""
