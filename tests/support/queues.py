"""Shows the contents of a queue from outside, with redis-py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis

from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import decode_delayed_member
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
        #: The server that holds the queue. All keys of a queue are on one Cluster node, so a plain client is enough.
        self.node: Server = self.server.node_of(self.keys.tag) if hasattr(self.server, "node_of") else self.server
        self.client: Any = self.node.client()

    def entries(self) -> list[tuple[bytes, list[bytes]]]:
        """Return the raw entries of the stream: the ID, then fields and values in order."""
        raw = self.client.execute_command("XRANGE", self.keys.stream, "-", "+", NEVER_DECODE=[])
        return [(entry_id, flat_fields(fields)) for entry_id, fields in raw]

    def jobs(self) -> list[Job[Any]]:
        """Return the jobs in the stream, in order."""
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

    # --- delayed jobs

    def delayed(self) -> list[tuple[bytes, int]]:
        """Return members and scores of the delayed set, earliest first."""
        return [(member, int(score)) for member, score in self.client.zrange(self.keys.delayed, 0, -1, withscores=True)]

    def delayed_jobs(self) -> list[Job[Any]]:
        found = []
        for member, _ in self.delayed():
            name, envelope = decode_delayed_member(member)
            found.append(decode_job(envelope, name))
        return found

    def delayed_ids(self) -> list[str]:
        return [job.id for job in self.delayed_jobs()]

    # --- written by workers

    def flat(self, key: str) -> list[list[str]]:
        """Return the entries of a stream as text, each as its fields and values in order."""
        raw = self.client.execute_command("XRANGE", key, "-", "+", NEVER_DECODE=[])
        return [[part.decode(errors="replace") for part in flat_fields(fields)] for _, fields in raw]

    def events(self, job_id: str | None = None) -> list[dict[str, str]]:
        """Return the events of one job or of all."""
        found = [dict(zip(one[::2], one[1::2], strict=True)) for one in self.flat(self.keys.events)]
        return found if job_id is None else [event for event in found if event["id"] == job_id]

    def event_names(self, job_id: str) -> list[str]:
        return [event["e"] for event in self.events(job_id)]

    def dead_letters(self) -> list[DlqEntry]:
        raw = self.client.execute_command("XRANGE", self.keys.dlq, "-", "+", NEVER_DECODE=[])
        return [decode_dlq_fields(entry_id.decode(), flat_fields(fields)) for entry_id, fields in raw]

    def pending(self, group: str = "default") -> list[dict[str, Any]]:
        """Return the pending list: message_id, consumer, time_since_delivered, times_delivered."""
        try:
            return self.client.xpending_range(self.keys.stream, group, "-", "+", 10_000)
        except redis.ResponseError as error:
            if str(error).startswith("NOGROUP"):
                return []
            raise

    def consumers(self, group: str = "default") -> list[str]:
        return [one["name"].decode() for one in self.client.xinfo_consumers(self.keys.stream, group)]

    def groups(self) -> list[str]:
        return [one["name"].decode() for one in self.client.xinfo_groups(self.keys.stream)]

    def is_settled(self) -> bool:
        """Return whether no job is waiting, pending or delayed."""
        return self.length() == 0 and not self.pending() and not self.delayed()

    def result(self, job_id: str) -> bytes | None:
        return self.client.get(self.keys.result(job_id))

    # --- the server

    def all_keys(self) -> dict[str, int]:
        """Return every key of the queue, without its tag, and the TTL in seconds (-1: none)."""
        tag = self.keys.tag
        found = sorted(self.client.scan_iter(f"{tag}*", count=1000))
        with self.client.pipeline(transaction=False) as pipeline:
            for key in found:
                pipeline.ttl(key)
            return dict(zip((key.decode().removeprefix(tag) for key in found), pipeline.execute(), strict=True))

    def chain_keys(self) -> list[str]:
        return [key for key in self.all_keys() if key.startswith(":pseq:")]

    def errors_given(self) -> Counter[str]:
        """Return the number of errors the server has returned since it started, by kind: `NOSCRIPT`, `OOM`."""
        stats = self.client.info("errorstats")
        return Counter({name.removeprefix("errorstat_"): stat["count"] for name, stat in stats.items()})

    def connections(self) -> list[dict[str, str]]:
        """Return the open connections of tampu clients to the server."""
        found = self.client.client_list()
        return [one for one in found if one["name"] == "tampu" and int(one["id"]) > self.node.reset_id]

    def waiting_reads(self) -> int:
        """Return the number of worker reads that are blocked on the server."""
        return sum(one["cmd"] == "xreadgroup" and "b" in one["flags"] for one in self.connections())

    def times_run(self, command: str) -> int:
        """Return how often the server has run a command since it started: `xadd`, `client|unblock`."""
        return self.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]

    def connections_made(self) -> int:
        """Return the number of connections that the server has accepted since it started."""
        return self.client.info("stats")["total_connections_received"]

    def now_ms(self) -> int:
        """Return the clock of the server that holds the queue."""
        seconds, microseconds = self.client.time()
        return seconds * 1000 + microseconds // 1000


def flat_fields(fields: Any) -> list[bytes]:
    """Return an entry's fields and values in order, whether redis-py returned a dict or a list."""
    if isinstance(fields, dict):
        return [part for pair in fields.items() for part in pair]
    return list(fields)
