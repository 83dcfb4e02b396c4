"""A view of a queue that also adds jobs byte by byte, without a producer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.queues import QueueView
from tampu.wire.entry import job_fields
from tampu.wire.envelope import encode_job
from tampu.wire.job import Job

if TYPE_CHECKING:
    from tampu.wire.retry import JobRetryOverride

CREATED_AT_MS = 1_700_000_000_000


@dataclass
class WorkerView(QueueView):
    """Adds jobs for workers and reads what they wrote."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._added = 0

    def add(
        self,
        payload: Any = None,
        *,
        name: str = "",
        job_id: str | None = None,
        attempt: int = 0,
        retry: JobRetryOverride | None = None,
    ) -> str:
        """Add one job and return its id."""
        self._added += 1
        job: Job[Any] = Job(job_id or f"job-{self._added}", name, payload, attempt, CREATED_AT_MS, retry=retry)
        self.add_fields(*job_fields(encode_job(job), name))
        return job.id

    def add_many(self, payloads: list[Any], *, at_once: bool = False) -> list[str]:
        """Add many jobs. With `at_once` a waiting reader gets them in one reply (not on a Cluster)."""
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
        """Add one entry with these fields and return its entry id."""
        return self.client.execute_command("XADD", self.keys.stream, "*", *fields).decode()
