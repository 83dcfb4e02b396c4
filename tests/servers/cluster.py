"""A Redis Cluster of three masters, and replicas if asked for, with the same face as one `Server`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.cluster import RedisCluster

from servers.process import HOST, Server, eventually, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from redis import Redis

MASTERS = 3
SLOTS = 16384


class Node(Server):
    """A server with a second port, on which the nodes talk to each other."""

    def _choose_ports(self) -> None:
        super()._choose_ports()
        # By default the first port plus 10,000, which nobody has checked to be free.
        self.settings["cluster-port"] = str(free_port())


@dataclass
class Cluster:
    """Masters first, then their replicas. To make trouble for one node, use `nodes[i]`."""

    kind: str
    binary: Path
    data_dir: Path
    replicas: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    nodes: list[Server] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clients: list[RedisCluster] = []
        for number in range(MASTERS * (1 + self.replicas)):
            settings = {
                "cluster-enabled": "yes",
                # How long a node may be silent before it counts as failed: short, so that failovers are, but longer
                # than a busy test machine makes a healthy node wait.
                "cluster-node-timeout": "2000",
                **self.settings,
            }
            self.nodes.append(Node(self.kind, self.binary, self.data_dir / f"node{number}", settings))

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.port}"

    @property
    def port(self) -> int:
        return self.nodes[0].port

    @property
    def address(self) -> tuple[str, int]:
        return self.nodes[0].address

    @property
    def version(self) -> str:
        return self.nodes[0].version

    @property
    def masters(self) -> list[Server]:
        """The nodes that were started as masters."""
        return self.nodes[:MASTERS]

    @property
    def is_running(self) -> bool:
        return all(node.is_running for node in self.nodes)

    def node_of(self, key: str | bytes) -> Server:
        """The master that holds a key, by what the Cluster says now."""
        client = self.client()
        address = client.get_node_from_key(key)
        return next(node for node in self.nodes if node.port == address.port)

    def require_no_crash(self) -> None:
        """Raise `ServerFailed` if a node has ended by itself."""
        for node in self.nodes:
            node.require_no_crash()

    # Its life

    def start(self) -> None:
        """Starts every node, forms the Cluster if this is the first time, and returns when all of them call it ok."""
        first_time = not self.port
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.await_ready()
        if first_time:
            self._form()
        self.await_ok()

    def await_ok(self) -> None:
        """Waits until every node sees the whole Cluster. Redis keeps a master back for 2 s after it came up."""
        for node in self.nodes:
            with node._connect(decode_responses=True) as client:
                eventually(partial(self._is_ok, client), f"the Cluster is ok for port {node.port}")

    def stop(self) -> None:
        self._close_clients()
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

    # Talking to it

    def client(self, **options: Any) -> RedisCluster:
        """A client that answers in bytes; closed for you when the test is over."""
        defaults = {"protocol": 2, "decode_responses": False, "socket_timeout": 10.0}
        client = RedisCluster(HOST, self.port, **(defaults | options))
        self._clients.append(client)
        return client

    def cli(self, *arguments: str) -> str:
        """What redis-cli prints, following redirections."""
        return self.nodes[0].cli("-c", *arguments)

    def config_set(self, **settings: str | int) -> None:
        for node in self.nodes:
            node.config_set(**settings)

    def reset(self) -> None:
        """Makes it as new for the next test."""
        self._close_clients()
        if not self.is_running:
            self.kill()
            self.start()
        for node in self.nodes:
            node.resume()
        self.await_ok()
        for node in self.masters:
            node.reset()

    # How it is formed

    def _form(self) -> None:
        share = SLOTS // MASTERS
        for number, node in enumerate(self.nodes):
            with node._connect() as client:
                # Distinct from the start: nodes that all begin at 0 first quarrel about it.
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                if number < MASTERS:
                    last = SLOTS - 1 if number == MASTERS - 1 else (number + 1) * share - 1
                    client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
                # Each meets each: gossip would make them known to one another too, but later.
                for other in self.nodes[:number]:
                    client.execute_command("CLUSTER MEET", HOST, other.port, other.settings["cluster-port"])
        for number, node in enumerate(self.nodes[MASTERS:]):
            master = self.nodes[number % MASTERS].client().execute_command("CLUSTER MYID").decode()
            with node._connect(decode_responses=True) as client:
                known = partial(client.execute_command, "CLUSTER NODES")
                eventually(partial(_knows, known, master), "the replica knows its master")
                client.execute_command("CLUSTER REPLICATE", master)

    def _is_ok(self, client: Redis) -> bool:
        info = client.execute_command("CLUSTER INFO")
        if info["cluster_state"] != "ok" or int(info["cluster_known_nodes"]) != len(self.nodes):
            return False
        # Each range of slots is [first, last, master, replica...].
        ranges = client.execute_command("CLUSTER SLOTS")
        return len(ranges) == MASTERS and all(len(served_by) == 3 + self.replicas for served_by in ranges)

    def _close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()


def _knows(known: Callable[[], object], master: str) -> bool:
    return master in str(known())
