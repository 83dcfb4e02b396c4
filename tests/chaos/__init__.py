"""Chaos: real workers and producers on real servers under injected faults, and a checker that proves their history.

| file           | what it does                                                                                       |
|----------------|----------------------------------------------------------------------------------------------------|
| `records.py`   | the record that every process appends to its own file, and the history made of all files           |
| `checker.py`   | the promises: a pure function from a history to its violations                                     |
| `hits.py`      | how many jobs were in flight when each fault was injected                                          |
| `worker.py`    | a worker process whose handlers record what they do                                                |
| `chasquimq_worker.py` | the same for chasquimq 1.3.0, whose faults the checker must find                             |
| `producer.py`  | a producer process that records what it asked for and what was confirmed                           |
| `fleet.py`     | starts, kills, stops and restarts these processes                                                  |
| `wire.py`      | a TCP proxy that cuts, delays, throttles, half-closes and swallows                                 |
| `servers.py`   | servers with persistence and a clock that can be set                                               |
| `faults.py`    | every kind of fault: what it does, and which second starts it excuses                              |
| `run.py`       | one run: start, inject, heal, drain, collect, check, report                                        |
| `__main__.py`  | `make chaos`                                                                                       |
| `soak.py`      | `make soak`                                                                                        |
"""
