"""Repeatable jobs: schedules by which a queue gets a job again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.add_arguments import repeatable_spec
from tampu.clock import wall_clock_ms
from tampu.queue.answers import Answers
from tampu.wire.job import Job

if TYPE_CHECKING:
    from tampu.add_arguments import Backoff, MissedFires
    from tampu.wire.repeat import RepeatableMeta, RepeatPattern


class Repeating(Answers):
    """Registers repeatable jobs, lists and removes them. A job that it gives back asks it for its result."""

    async def upsert_repeatable_job(
        self,
        name: str,
        data: Any,
        *,
        repeat: RepeatPattern,
        limit: int | None = None,
        start_after_ms: int | None = None,
        end_before_ms: int | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        job_id: str | None = None,
        missed_fires: MissedFires | None = None,
    ) -> Job[Any]:
        """Register a repeatable job, or replace it; the job's id is the key it is registered under.

        `attempts`, `backoff` and `job_id` are accepted and not used: the wire format has no place for them.
        """
        del attempts, backoff, job_id
        bounds = {"limit": limit, "start_after_ms": start_after_ms, "end_before_ms": end_before_ms}
        spec = repeatable_spec(name, data, repeat, missed_fires, **bounds)
        return self._added(await self._producer.upsert_repeatable(spec), name, data)

    async def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """Up to `limit` repeatable jobs, the next to fire first."""
        return await self._producer.list_repeatable(limit)

    async def remove_repeatable_by_key(self, key: str) -> bool:
        """Remove a repeatable job; whether it was there."""
        return await self._producer.remove_repeatable(key)

    def _added(self, job_id: str, name: str, data: Any) -> Job[Any]:
        # Not Job(...): what was sent a moment ago need not be checked and encoded again.
        job: Job[Any] = Job.from_wire(job_id, b"", wall_clock_ms(), 0, None, name)
        job._payload = data
        job._context = self
        return job
