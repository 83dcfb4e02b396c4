"""Helpers for tests: one for each purpose. (Servers to test against are fixtures: see `tests/conftest.py`.)

| to have                                                        | use                                       |
|----------------------------------------------------------------|-------------------------------------------|
| a connection that breaks, stalls or is refused at a given byte | `proxy.Proxy`; it keeps what was sent     |
| a server whose replies the test makes up                       | `peer.Peer`                               |
| replies in an order that no server can be made to give         | `clients.StandInClient`                   |
| a client of the queue `q`                                      | `clients.open_client`                     |
| a producer; small windows, a short patience, what it sent      | `producers`                               |
| a promoter, scheduler or consumer that runs for a block        | `parts.running`, `parts.consuming`        |
| one of them in its own process, to pause or to kill            | `parts.PartProcess`                       |
| a consumer with short waits, or workers in processes           | `consume.workers`                         |
| a `Worker` with short waits                                    | `api.workers.working`                     |
| a delayed job, due when the test says                          | `delayed.delay`, `delayed.member_of`      |
| a repeatable job, due when the test says                       | `repeating`                               |
| a user with limited rights                                     | `users.acl_user`                          |
| a fleet under faults, and a proof of what it did               | `chaos.run`                               |

| to know                                                        | use                                       |
|----------------------------------------------------------------|-------------------------------------------|
| what is in a queue, and what its server has seen               | `queues.QueueView`                        |
| what is logged as a warning or an error                        | the fixture `troubles.troubles`           |
| when a condition holds, while the event loop runs              | `waiting.until`                           |
| when a condition holds, without an event loop                  | `servers.process.eventually`              |
| where a request or a reply ends, and what is in it             | `resp`                                    |
"""
