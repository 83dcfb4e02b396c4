"""Chaos suite: real workers and producers on real servers under injected faults, and a checker for what they recorded.

| file           | what it does                                                                                       |
|----------------|----------------------------------------------------------------------------------------------------|
| `records.py`   | the record that every process appends to its own file, and the history made of all files           |
| `checker.py`   | checks the promises: a pure function from a history to its violations                              |
| `hits.py`      | counts the jobs that were in flight during each fault                                              |
| `worker.py`    | a worker process whose handlers record what they do                                                |
| `chasquimq_worker.py` | a worker process of chasquimq 1.3.0, whose bugs the checker must find                       |
| `producer.py`  | a producer process that records what it asked for and what was confirmed                           |
| `fleet.py`     | starts, kills, stops and restarts these processes                                                  |
| `wire.py`      | a TCP proxy that cuts, delays, throttles, half-closes and swallows                                 |
| `servers.py`   | servers with persistence and a clock that can be set                                               |
| `faults.py`    | every kind of fault, and what it does                                                              |
| `failovers.py` | records each failover, with the time from which on writes are lost                                 |
| `run.py`       | one run: start, inject, heal, drain, collect, check, report                                        |
| `__main__.py`  | `make chaos`                                                                                       |
| `soak.py`      | `make soak`                                                                                        |
"""
