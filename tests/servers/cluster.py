"""A Redis Cluster of three masters, optionally with replicas, with the same interface as `Server`."""

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
    """A server with a second port, for communication between the nodes."""

    def _choose_ports(self) -> None:
        super()._choose_ports()
        # The default is the first port plus 10,000, which may be taken.
        self.settings["cluster-port"] = str(free_port())


@dataclass
class Cluster:
    """The masters come first, then their replicas. Use `nodes[i]` to disturb a single node."""

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
                # Short, so that failovers are fast, but longer than the time a healthy node is silent on a busy
                # machine.
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
        """Return the master that currently holds a key."""
        client = self.client()
        address = client.get_node_from_key(key)
        return next(node for node in self.nodes if node.port == address.port)

    def move_slot(self, key: str | bytes, target: Server) -> None:
        """Move the slot of a key to another master, key by key, while it is used."""
        source = self.node_of(key)
        with source._connect() as old, target._connect() as new:
            slot = old.execute_command("CLUSTER KEYSLOT", key)
            old_id, new_id = (client.execute_command("CLUSTER MYID").decode() for client in (old, new))
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
            while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 50):
                old.execute_command("MIGRATE", target.address[0], target.port, "", 0, 20000, "KEYS", *keys)
            for node in (target, source, *self.masters):
                with node._connect() as client:
                    client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_id)

    def require_no_crash(self) -> None:
        """Raise `ServerFailed` if a node has ended by itself."""
        for node in self.nodes:
            node.require_no_crash()

    # Start and stop

    def start(self) -> None:
        """Start every node, form the Cluster on the first start, and wait until all nodes report it as ok."""
        first_time = not self.port
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.await_ready()
        if first_time:
            self._form()
        self.await_ok()

    def await_ok(self) -> None:
        """Wait until every node sees the whole Cluster. Redis keeps a master back for 2 s after it has started."""
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

    # Clients and commands

    def client(self, **options: Any) -> RedisCluster:
        """Return a client that returns bytes; it is closed after the test."""
        defaults = {"protocol": 2, "decode_responses": False, "socket_timeout": 10.0}
        client = RedisCluster(HOST, self.port, **(defaults | options))
        self._clients.append(client)
        return client

    def cli(self, *arguments: str) -> str:
        """Return the output of redis-cli, which follows redirections."""
        return self.nodes[0].cli("-c", *arguments)

    def config_set(self, **settings: str | int) -> None:
        for node in self.nodes:
            node.config_set(**settings)

    def reset(self) -> None:
        """Reset it for the next test."""
        self._close_clients()
        if not self.is_running:
            self.kill()
            self.start()
        for node in self.nodes:
            node.resume()
        self.await_ok()
        for node in self.masters:
            node.reset()

    # Formation

    def _form(self) -> None:
        share = SLOTS // MASTERS
        for number, node in enumerate(self.nodes):
            with node._connect() as client:
                # Distinct from the start: nodes that all start at 0 have to resolve conflicts first.
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                if number < MASTERS:
                    last = SLOTS - 1 if number == MASTERS - 1 else (number + 1) * share - 1
                    client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
                # Every node meets every other; gossip would introduce them too, but later.
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
