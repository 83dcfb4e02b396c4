"""What became of jobs: their results and their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.checks import check_job_id
from tampu.job_state import JobState, find_job
from tampu.queue.base import QueueBase
from tampu.wire.results import decode_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.wire.job import Job


class Answers(QueueBase):
    """Answers questions about jobs by their ids."""

    async def get_job_result(self, job_id: str) -> Any:
        """What the handler returned; None when it returned None, or there is no result (yet, or any more)."""
        packed = await self._producer.get_result(job_id)
        return None if packed is None else decode_result(packed)

    async def get_job_result_bulk(self, job_ids: Sequence[str]) -> list[Any]:
        """Several results at once, in the order of the ids."""
        results = await self._producer.get_result_bulk(list(job_ids))
        return [None if packed is None else decode_result(packed) for packed in results]

    async def get_job(self, job_id: str) -> JobState:
        """Where a job is: waiting, delayed until when, running where, done with what, dead and why."""
        return await find_job(self._producer.ready_pipe(), self._keys, check_job_id(job_id))

    async def wait_for_result(self, job_id: str, timeout_secs: float) -> Any:
        """What a job's handler returns, once it has; `Job.result` is the usual way to ask."""
        self._producer.ready_pipe()
        return await self._waiters.wait(job_id, timeout_secs)

    def report_progress(self, job: Job[Any], fraction: float, note: str) -> None:
        """Only a running job makes progress."""
        raise RuntimeError("this job is not running here: progress() is for a handler's own job")
