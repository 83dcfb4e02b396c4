"""Adding jobs by name: one, one of an id, many at once; and calling off those that wait for their time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tampu.add_arguments import (
    BULK_OPTIONS,
    MISSED_FIRES_ALONE,
    Backoff,
    DelayMs,
    MissedFires,
    Repeat,
    add_options,
    bulk_entry,
    delay_or_instant,
    repeat_pattern,
    repeatable_spec,
)
from tampu.checks import refuse
from tampu.errors import ConfigError, Error
from tampu.queue.encoded import Encoded
from tampu.queue.repeating import Repeating
from tampu.wire.job import Job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from datetime import datetime, timedelta

    from tampu.engine.options import AddOptions
    from tampu.wire.job import JobId


class Adding(Repeating):
    """Adds jobs. A job with `repeat` is a schedule, which is why this stands on those."""

    async def add(
        self,
        name: str,
        data: Any,
        *,
        delay_ms: DelayMs | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        job_id: str | None = None,
        repeat: Repeat | None = None,
        missed_fires: MissedFires | None = None,
    ) -> Job[Any]:
        """Add one job under `name`. `job.id.is_new` tells whether an explicit `job_id` was new."""
        if repeat is not None:
            return await self.upsert_repeatable_job(
                name, data, repeat=repeat_pattern(repeat), missed_fires=missed_fires
            )
        if missed_fires is not None:
            raise ConfigError(MISSED_FIRES_ALONE)
        seconds, instant = delay_or_instant(delay_ms, delay)
        options = add_options(name, job_id, attempts, backoff)
        return self._added(await self._send(data, options, seconds, instant), name, data)

    async def _send(self, data: Any, options: AddOptions, seconds: float, instant: datetime | None) -> JobId:
        if instant is not None:
            return await self._producer.add_at_with_options(instant, data, options)
        if seconds > 0:
            return await self._producer.add_in_with_options(seconds, data, options)
        return await self._producer.add_with_options(data, options)

    async def add_unique(
        self,
        name: str,
        data: Any,
        *,
        job_id: str,
        delay_ms: DelayMs | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        repeat: Repeat | None = None,
    ) -> Job[Any]:
        """`add` with an id that is required: the same id is not added again for `dedup_ttl_secs`."""
        if job_id is None:
            raise refuse("job_id", job_id, "text that is not blank")
        return await self.add(
            name,
            data,
            delay_ms=delay_ms,
            delay=delay,
            attempts=attempts,
            backoff=backoff,
            job_id=job_id,
            repeat=repeat,
        )

    async def add_bulk(self, jobs: Iterable[Mapping[str, Any]]) -> list[Job[Any]]:
        """Add many jobs: dicts with `name`, `data`, and what else `add` takes. All are checked before any is sent.

        Should some be refused all the same (a full queue), the error's `accepted` names those that got in.
        """
        entries = [bulk_entry(job) for job in jobs]
        if not any(entry.get(option) is not None for entry in entries for option in BULK_OPTIONS):
            named = [(entry.get("name") or "", entry["data"]) for entry in entries]
            ids = await self._producer.add_bulk_named(named)
            return [self._added(job_id, name, data) for job_id, (name, data) in zip(ids, named, strict=True)]
        sending = [self._prepared(**entry) for entry in entries]
        answers = await asyncio.gather(*(send() for send in sending), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            if isinstance(errors[0], Error):
                errors[0].accepted = [job.id for job in answers if isinstance(job, Job)]
            raise errors[0]
        return [job for job in answers if isinstance(job, Job)]

    def _prepared(
        self,
        data: Any,
        name: str | None = None,
        delay_ms: DelayMs | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        job_id: str | None = None,
        repeat: Repeat | None = None,
        missed_fires: MissedFires | None = None,
    ) -> Callable[[], Awaitable[Job[Any]]]:
        """An add that is checked and encoded and only has to be sent."""
        name = name or ""
        payload = Encoded(self._producer.encode(data))
        if repeat is not None:
            spec = repeatable_spec(name, payload, repeat, missed_fires)

            async def register() -> Job[Any]:
                return self._added(await self._producer.upsert_repeatable(spec), name, data)

            return register
        if missed_fires is not None:
            raise ConfigError(MISSED_FIRES_ALONE)
        seconds, instant = delay_or_instant(delay_ms, delay)
        options = add_options(name, job_id, attempts, backoff)

        async def send() -> Job[Any]:
            return self._added(await self._send(payload, options, seconds, instant), name, data)

        return send

    async def cancel_delayed(self, job_id: str) -> bool:
        """Cancel a job that waits for its time or its retry; False when it is not waiting."""
        return await self._producer.cancel_delayed(job_id)
