"""A look into a queue from outside, with redis-py: what is really there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tampu.wire.delayed import decode_delayed_member
from tampu.wire.envelope import decode_job
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.wire.job import Job


@dataclass
class QueueView:
    """The keys of one queue on one server."""

    server: Server | Cluster
    name: str

    def __post_init__(self) -> None:
        self.keys = QueueKeys(self.name)
        # All keys of a queue are on one node, so a plain client of that node will do.
        node = self.server.node_of(self.keys.tag) if hasattr(self.server, "node_of") else self.server
        self.client: Any = node.client()

    def entries(self) -> list[tuple[bytes, list[bytes]]]:
        """The stream's entries as they are: id, then fields and values in their order."""
        raw = self.client.execute_command("XRANGE", self.keys.stream, "-", "+", NEVER_DECODE=[])
        return [(entry_id, _flat(fields)) for entry_id, fields in raw]

    def jobs(self) -> list[Job[Any]]:
        """The jobs in the stream, in order."""
        jobs = []
        for _, fields in self.entries():
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            jobs.append(decode_job(values[b"d"], values.get(b"n", b"").decode()))
        return jobs

    def ids(self) -> list[str]:
        return [job.id for job in self.jobs()]

    def payloads(self) -> list[Any]:
        return [job.payload for job in self.jobs()]

    def length(self) -> int:
        return self.client.xlen(self.keys.stream)

    def delayed(self) -> list[tuple[bytes, int]]:
        """Members and scores of the delayed set, the earliest first."""
        return [(member, int(score)) for member, score in self.client.zrange(self.keys.delayed, 0, -1, withscores=True)]

    def delayed_jobs(self) -> list[Job[Any]]:
        found = []
        for member, _ in self.delayed():
            name, envelope = decode_delayed_member(member)
            found.append(decode_job(envelope, name))
        return found

    def delayed_ids(self) -> list[str]:
        return [job.id for job in self.delayed_jobs()]

    def all_keys(self) -> dict[str, int]:
        """Every key of the queue, without the tag, and its TTL in seconds (-1: none)."""
        tag = self.keys.tag
        found = sorted(self.client.scan_iter(f"{tag}*", count=1000))
        with self.client.pipeline(transaction=False) as pipeline:
            for key in found:
                pipeline.ttl(key)
            return dict(zip((key.decode().removeprefix(tag) for key in found), pipeline.execute(), strict=True))

    def chain_keys(self) -> list[str]:
        return [key for key in self.all_keys() if key.startswith(":pseq:")]

    def now_ms(self) -> int:
        """The clock of the server that holds the queue."""
        seconds, microseconds = self.client.time()
        return seconds * 1000 + microseconds // 1000


def _flat(fields: Any) -> list[bytes]:
    if isinstance(fields, dict):
        return [part for pair in fields.items() for part in pair]
    return list(fields)
