"""A master, its replica and the sentinels that monitor them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from servers.process import HOST, Server, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from redis import Redis


class SentinelNode(Server):
    """A server that runs as a sentinel; its `settings` follow the port and the folder in the configuration file."""

    def _configuration(self) -> dict[str, str]:
        return {"bind": HOST, "port": str(self.port), "dir": f'"{self.data_dir}"', **self.settings}

    def _command(self) -> list[str]:
        return [*super()._command(), "--sentinel"]


@dataclass
class SentinelSetup:
    """A Sentinel setup. `start` waits until every sentinel knows the master, its replica and all other sentinels."""

    binary: Path
    data_dir: Path
    sentinel_count: int = 1
    #: The name of the master in the sentinels' configuration.
    name: str = "tampu-test"
    master: Server = field(init=False)
    replica: Server = field(init=False)
    sentinels: list[SentinelNode] = field(init=False)

    def __post_init__(self) -> None:
        self.master = Server("redis86", self.binary, self.data_dir / "master")
        self.replica = Server("redis86", self.binary, self.data_dir / "replica")
        self.sentinels = [
            SentinelNode("redis86", self.binary, self.data_dir / f"sentinel{number}")
            for number in range(self.sentinel_count)
        ]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Addresses of the sentinels."""
        return [sentinel.address for sentinel in self.sentinels]

    @property
    def url(self) -> str:
        places = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"redis+sentinel://{places}/{self.name}"

    def current_master(self) -> Server:
        """Return the server that the sentinels currently report as master."""
        with self.sentinels[0]._connect(decode_responses=True) as client:
            _, port = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.name)
        return self.master if int(port) == self.master.port else self.replica

    def start(self) -> None:
        self.master.start()
        self.replica.settings["replicaof"] = f"{HOST} {self.master.port}"
        self.replica.start()
        # A sentinel asks its master for replicas at once and then every 10 s, so the replica must be there first.
        with self.master._connect() as client:
            eventually(lambda: self._has_replica(client), "the replica is online")
        for sentinel in self.sentinels:
            quorum = self.sentinel_count // 2 + 1
            sentinel.settings |= {
                "sentinel monitor": f"{self.name} {HOST} {self.master.port} {quorum}",
                "sentinel down-after-milliseconds": f"{self.name} 500",
                "sentinel failover-timeout": f"{self.name} 3000",
            }
            sentinel.launch()
        for sentinel in self.sentinels:
            sentinel.await_ready()
        for sentinel in self.sentinels:
            with sentinel._connect(decode_responses=True) as client:
                eventually(partial(self._knows_all, client), "the sentinel knows all others")

    def require_no_crash(self) -> None:
        """Raise `ServerFailed` if one of the processes has ended by itself."""
        for server in (*self.sentinels, self.replica, self.master):
            server.require_no_crash()

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()

    @staticmethod
    def _has_replica(client: Redis) -> bool:
        replica: Any = client.info("replication").get("slave0")
        return bool(replica) and replica["state"] == "online"

    def _knows_all(self, client: Redis) -> bool:
        master: Any = client.sentinel_master(self.name)
        return master["num-slaves"] == 1 and master["num-other-sentinels"] == self.sentinel_count - 1
