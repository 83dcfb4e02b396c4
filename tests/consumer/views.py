"""A look at a queue from outside, and jobs put there by hand, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis

from support.queues import QueueView
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import job_fields
from tampu.wire.envelope import encode_job
from tampu.wire.job import Job

if TYPE_CHECKING:
    from tampu.wire.retry import JobRetryOverride

CREATED_AT_MS = 1_700_000_000_000


@dataclass
class WorkerView(QueueView):
    """What workers of one queue left on one server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._added = 0

    # --- adding

    def add(
        self,
        payload: Any = None,
        *,
        name: str = "",
        job_id: str | None = None,
        attempt: int = 0,
        retry: JobRetryOverride | None = None,
    ) -> str:
        """One job; its id."""
        self._added += 1
        job: Job[Any] = Job(job_id or f"job-{self._added}", name, payload, attempt, CREATED_AT_MS, retry=retry)
        self.add_fields(*job_fields(encode_job(job), name))
        return job.id

    def add_many(self, payloads: list[Any], *, at_once: bool = False) -> list[str]:
        """Many jobs; `at_once`: a reader that waits gets them in one reply (not on a Cluster)."""
        ids = []
        pipeline = self.client.pipeline(transaction=at_once)
        for payload in payloads:
            self._added += 1
            job: Job[Any] = Job(f"job-{self._added}", "", payload, 0, CREATED_AT_MS)
            pipeline.execute_command("XADD", self.keys.stream, "*", *job_fields(encode_job(job), ""))
            ids.append(job.id)
        pipeline.execute()
        return ids

    def add_fields(self, *fields: bytes | str) -> str:
        """One entry with these fields; the entry's id."""
        return self.client.execute_command("XADD", self.keys.stream, "*", *fields).decode()

    # --- looking

    def flat(self, key: str) -> list[list[str]]:
        """A stream's entries, each as its fields and values in their order, as text."""
        raw = self.client.execute_command("XRANGE", key, "-", "+", NEVER_DECODE=[])
        return [[part.decode(errors="replace") for part in _flat(fields)] for _, fields in raw]

    def events(self, job_id: str | None = None) -> list[dict[str, str]]:
        """The events, of one job or of all."""
        found = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in self.flat(self.keys.events)]
        return found if job_id is None else [event for event in found if event["id"] == job_id]

    def event_names(self, job_id: str) -> list[str]:
        return [event["e"] for event in self.events(job_id)]

    def dead_letters(self) -> list[DlqEntry]:
        raw = self.client.execute_command("XRANGE", self.keys.dlq, "-", "+", NEVER_DECODE=[])
        return [decode_dlq_fields(entry_id.decode(), _flat(fields)) for entry_id, fields in raw]

    def pending(self, group: str = "default") -> list[dict[str, Any]]:
        """The pending list: message_id, consumer, time_since_delivered, times_delivered; empty without a group."""
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
        """Nothing waits, nothing is pending, nothing is to be retried."""
        return self.length() == 0 and not self.pending() and not self.delayed()

    def result(self, job_id: str) -> bytes | None:
        return self.client.get(self.keys.result(job_id))


def _flat(fields: Any) -> list[bytes]:
    if isinstance(fields, dict):
        return [part for pair in fields.items() for part in pair]
    return list(fields)
