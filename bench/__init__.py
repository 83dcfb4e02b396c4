"""Benchmarks of tampu, its peers and the limit. Run with `make bench`, `make bench-quick` or `make profile`.

| module | role |
|---|---|
| `program/` | shared by all contestants' programs: the protocol, the clock, the payloads |
| `ours/` | tampu's scenarios |
| `peers/` | one program per peer, run in its own environment |
| `limit/` | the same commands from C (`redis-benchmark`) and from a bare loop |
| `contestants.py` | starts the programs and sends them requests |
| `plan.py` | which contestant runs which scenario, how often, with how many jobs |
| `bars.py` | the targets: ratios that must hold |
| `runner.py` | interleaved rounds |
| `record.py` | one JSON file per run |
| `report.py` | the page, the plots and the README's table, generated from that file |
"""
