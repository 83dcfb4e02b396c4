"""Watches a master and its replica, and records for each failover from when on writes may be lost.

The watch writes the clock to a key on the master, again and again. After a failover, the value on the new master is the
time of the last stamp that was replicated: every write before it was replicated too, because replication keeps the
order. So the checker needs no guess about how far a replica lags.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import redis

if TYPE_CHECKING:
    from chaos.records import Recorder
    from servers.process import Server

KEY = "chaos:stamp"
#: Time between two stamps, in seconds.
STAMP_SECS = 0.05


class FailoverWatch:
    """Stamps the master, in a thread. Every failover is recorded, also one that no fault has asked for."""

    def __init__(self, master: Server, replica: Server, records: Recorder) -> None:
        self._master, self._replica = master, replica
        self._records = records
        #: Writes from this time on are on the current master at the most: that of the last failover, or the start.
        self._since = time.monotonic_ns()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failover-watch", daemon=True)
        #: How many failovers were recorded.
        self.failovers = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(STAMP_SECS):
            with contextlib.suppress(redis.RedisError, OSError), self._master._connect(socket_timeout=2.0) as client:
                while not self._stopping.wait(STAMP_SECS):
                    try:
                        client.set(KEY, f"{self._master.port} {time.monotonic_ns()}")
                    except redis.ReadOnlyError:
                        self._record_failover()
                        break

    def _record_failover(self) -> None:
        """Record the failover once the replica is the master. Until here, only the old master was stamped."""
        with self._replica._connect(socket_timeout=2.0) as client:
            if client.execute_command("ROLE")[0] != b"master":
                return
            port, _, stamp = (client.get(KEY) or b"").decode().partition(" ")
        # A server that was never in sync with the old master has none of its stamps.
        begin = int(stamp) if port == str(self._master.port) else self._since
        self._records.write("fault", "failover", "*", begin, time.monotonic_ns())
        self._master, self._replica = self._replica, self._master
        self._since = begin
        self.failovers += 1
