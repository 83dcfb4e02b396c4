"""Helpers for tests, one per purpose. (The servers under test are fixtures: see `tests/conftest.py`.)

| you need                                                       | use                                       |
|----------------------------------------------------------------|-------------------------------------------|
| a connection that breaks, stalls or is refused at a given byte | `proxy.Proxy`; it records what was sent   |
| a server with scripted replies                                 | `peer.Peer`                               |
| replies in an order that no real server would give             | `clients.StandInClient`                   |
| a client of the queue `q`                                      | `clients.open_client`                     |
| a producer; small windows, a short timeout, its requests       | `producers`                               |
| a promoter, scheduler or consumer that runs for a block        | `parts.running`, `parts.consuming`        |
| one of them in its own process, to pause or kill               | `parts.PartProcess`                       |
| a consumer with short intervals, or workers in processes       | `consume.workers`                         |
| a `Worker` with short intervals                                | `api.workers.working`                     |
| a delayed job, due when the test says                          | `delayed.delay`, `delayed.member_of`      |
| a schedule, due when the test says                             | `repeating`                               |
| a user with limited permissions                                | `users.acl_user`                          |
| a fleet under faults, and a proof of what it did               | `chaos.run`                               |

| you want to check                                              | use                                       |
|----------------------------------------------------------------|-------------------------------------------|
| the contents of a queue, and the requests its server got       | `queues.QueueView`                        |
| the warnings and errors logged                                 | the fixture `troubles.troubles`           |
| a condition, while the event loop runs                         | `waiting.until`                           |
| a condition, without an event loop                             | `servers.process.eventually`              |
| lines that other processes append to a file                    | `lines.whole_lines`                       |
| where a request or reply ends, and what it contains            | `resp`                                    |
"""
