"""Owns the entries in flight: delivered to this consumer and not yet settled, handed back or lost.

```
receive ──► held ──► settled           outcome written, entry acknowledged
              ├────► handed back       not started: another worker runs it
              └────► lost              another worker has taken it over
```
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.base.checks import MAX_ID_BYTES, MAX_NAME_BYTES, is_short
from tampu.base.clock import wall_clock_ms
from tampu.consume.outcomes import DeadLetter, Success
from tampu.errors import DecodeError
from tampu.redis import calls
from tampu.redis.calls import START_MARK
from tampu.redis.scripts import SettleCode
from tampu.wire.codec import QueueCodec
from tampu.wire.dlq import MISSING_PAYLOAD, DlqReason
from tampu.wire.entry import first_values, read_job_fields, text_or_empty
from tampu.wire.envelope import decode_job
from tampu.wire.job import Cancellation, Job
from tampu.wire.payload import decode_slot

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.outcomes import Observers, Outcome
    from tampu.consume.runtime import ServedQueue
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: Worker deaths with an entry running alone, before it becomes a dead letter.
LONE_DEATHS = 3
#: Worker deaths in total: in its first run, in parallel, in a small group (see `takeover.py`), then `LONE_DEATHS`.
MAX_DEATHS = 3 + LONE_DEATHS
#: Entries handed back in one call.
HAND_BACK_BATCH = 100
#: Pending entries of this consumer that are checked, beyond those it holds.
MAX_UNDELIVERED = 1000
#: Names and IDs of up to this many characters are short in any encoding: nearly all are, and need no call to find out.
SHORT_TEXT = min(MAX_NAME_BYTES, MAX_ID_BYTES) // 4
#: How much a server's count of idle time may differ from the local one, in milliseconds.
CLOCK_MARGIN_MS = 50


class WorkerLost(Exception):  # noqa: N818 - what dead letters show as the error's type
    """The error of a job whose worker died or lost the lease before it could report one."""


class Delivery:
    """One entry in flight, decoded."""

    __slots__ = (
        "earlier_deliveries",
        "entry_id",
        "has_outcome",
        "is_last_attempt",
        "is_lost",
        "is_running",
        "job",
        "queue",
        "started_at_ms",
        "started_ns",
        "task",
        "when_done",
    )

    #: The queue that it came from. Set when the entry may run.
    queue: ServedQueue
    #: When the handler started, by `boot_clock_ns`, and the task that runs it. Set when it starts.
    started_ns: int
    task: asyncio.Task[None]

    def __init__(self, entry_id: bytes, job: Job[Any], earlier_deliveries: int) -> None:
        self.entry_id = entry_id
        #: `job.attempt` counts the failed runs before this one; worker deaths are only added when the job is given up.
        self.job = job
        self.earlier_deliveries = earlier_deliveries
        #: No attempt is left after this one, so its start is recorded on the server.
        self.is_last_attempt = False
        self.is_running = False
        #: When the handler started, by the wall clock; 0 if no `active` event is to be sent for it (any more).
        self.started_at_ms = 0
        #: The handler has ended; only the outcome is left to write.
        self.has_outcome = False
        #: Another worker has taken it over: it must not start here, and if it runs, its failure does not count.
        self.is_lost = False
        #: Set by a takeover; called once, when the entry is settled or lost.
        self.when_done: Callable[[], object] | None = None

    @property
    def is_suspect(self) -> bool:
        """Return True if it was delivered before: the job may be one that kills its worker."""
        return self.earlier_deliveries > 0

    def cancel(self, reason: str) -> None:
        """Cancel the running handler. One in a thread continues until it checks, see `Job.check_cancelled`."""
        job = self.job
        if job._cancellation is not None:
            job._cancellation.reason = reason
            return
        job._cancellation = Cancellation(reason)
        self.task.cancel()

    def done(self) -> None:
        """Call `when_done`: the entry is settled or lost, or the server refused to write its outcome."""
        if self.when_done is not None:
            self.when_done()
            self.when_done = None


class InFlight:
    """Holds the entries in flight of one queue. Only the event loop changes it; the lease thread reads copies."""

    def __init__(
        self,
        client: Client,
        keys: QueueKeys,
        config: ConsumerConfig,
        reject: Callable[[Outcome], None],
        decode_payload: Callable[[bytes], Any] | None,
        observers: Observers,
        queue: ServedQueue,
    ) -> None:
        self._client = client
        self._keys = keys
        self._config = config
        #: Takes the dead letter of an entry that may not run.
        self._reject_with = reject
        self._decode_payload = decode_payload
        self._codec = QueueCodec.of(config.codec, config.queue_name)
        #: Opens and decodes payloads of jobs with the name `_opens_for`: nearly always that of the previous job.
        self._opens_for = ""
        self._open_named = partial(self._open_and_decode, "")
        self._observers = observers
        self._held: dict[bytes, Delivery] = {}
        self._queue = queue
        #: True when the server has XACKDEL.
        self.has_xackdel = False

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the entry ids. The lease thread calls this too, so it iterates over a copy, made atomically."""
        return iter(self._held.copy())

    def running_deliveries(self) -> list[Delivery]:
        """Return the deliveries whose handlers are running."""
        held = self._held.copy().values()
        return [delivery for delivery in held if delivery.is_running and not delivery.has_outcome]

    # --- coming in

    def receive(self, entry_id: bytes, fields: list[bytes], earlier_deliveries: int) -> Delivery | None:
        """Take in one entry. Return its delivery, or None if it must not run and becomes a dead letter."""
        if entry_id in self._held:
            return None  # already held here
        envelope, name = read_job_fields(fields)
        if envelope is None:
            self._reject(entry_id, DlqReason.MALFORMED, fields)
            return None
        if len(envelope) > self._config.max_payload_bytes:
            self._reject(entry_id, DlqReason.OVERSIZE_PAYLOAD, fields)
            return None
        try:
            job = decode_job(envelope, name)
        except Exception as error:  # not only DecodeError: no entry may keep the others of its read from running
            if not isinstance(error, DecodeError):
                logger.exception("internal error (please report it): entry %s cannot be decoded", entry_id.decode())
            self._reject(entry_id, DlqReason.DECODE_FAILED, fields, error.with_traceback(None))
            return None
        if len(name) > SHORT_TEXT or len(job.id) > SHORT_TEXT:
            for what, text, limit in (("name", name, MAX_NAME_BYTES), ("job ID", job.id, MAX_ID_BYTES)):
                if not is_short(text, limit):
                    self._reject(entry_id, DlqReason.MALFORMED, fields, detail=f"a {what} of over {limit} bytes")
                    return None
        if self._codec is not None:
            if name != self._opens_for:
                self._opens_for, self._open_named = name, partial(self._open_and_decode, name)
            job._decode = self._open_named
        elif self._decode_payload is not None:
            job._decode = self._decode_payload
        delivery = Delivery(entry_id, job, earlier_deliveries)
        delivery.queue = self._queue
        self._held[entry_id] = delivery
        own = job.retry.max_attempts if job.retry is not None else None  # as `max_attempts_of`, without a call
        attempts_left = (self._config.max_attempts if own is None else own) - job.attempt
        if (earlier_deliveries or attempts_left <= 1) and self._is_over(delivery, attempts_left):
            deaths = delivery.earlier_deliveries
            text = f"the worker died or lost its lease while it held the job; so far: {deaths}"
            self._bury(delivery, reason=DlqReason.RETRIES_EXHAUSTED, error=WorkerLost(text) if deaths else None)
            return None
        return delivery

    def _open_and_decode(self, name: str, slot: bytes) -> Any:
        opened = slot if self._codec is None else self._codec.open_slot(slot, name)
        return (self._decode_payload or decode_slot)(opened)

    def _is_over(self, delivery: Delivery, attempts_left: int) -> bool:
        """Return True if a job must not run again: no attempt is left, or it has killed too many workers."""
        has_begun = delivery.earlier_deliveries >= START_MARK
        if has_begun:
            delivery.earlier_deliveries -= START_MARK
        deaths = delivery.earlier_deliveries
        delivery.is_last_attempt = attempts_left == 1
        # A job that never began its last attempt only waited in workers that died, however many did.
        is_poison = not delivery.is_last_attempt and deaths >= min(MAX_DEATHS, attempts_left + LONE_DEATHS)
        if has_begun or is_poison:
            # The last attempt began once, whatever happened to the job before; of earlier ones, no start is recorded.
            delivery.job.attempt += 1 if has_begun else deaths
            return True
        return attempts_left <= 0

    def _reject(
        self,
        entry_id: bytes,
        reason: DlqReason,
        fields: list[bytes],
        error: BaseException | None = None,
        detail: str | None = None,
    ) -> None:
        values = first_values(fields)
        is_malformed = reason is DlqReason.MALFORMED and detail is None
        name = text_or_empty(values.get(b"n", b"")[:MAX_NAME_BYTES])
        job: Job[Any] = Job.from_wire("", b"\xc0", 0, 0, None, name)
        self._held[entry_id] = delivery = Delivery(entry_id, job, 0)
        self._bury(
            delivery,
            reason=reason,
            error=error,
            detail=MISSING_PAYLOAD if is_malformed else detail,
            envelope=values.get(b"d", b""),
            original=tuple(zip(fields[::2], fields[1::2], strict=False)) if is_malformed else None,
        )

    def _bury(self, delivery: Delivery, *, error: BaseException | None, **letter: Any) -> None:
        delivery.has_outcome = True
        worker = self._config.consumer_id
        outcome = DeadLetter(delivery, wall_clock_ms(), 0, worker=worker, ran=False, error=error, **letter)
        for observer in self._observers.failed:
            observer(outcome, error)
        self._reject_with(outcome)

    # --- going out

    def settled(self, outcome: Outcome, code: str) -> None:
        """Release an entry whose outcome the server answered with `code`."""
        self._held.pop(outcome.delivery.entry_id, None)
        if code == SettleCode.WRITTEN and not isinstance(outcome, Success):
            for observer in self._observers.settled:
                observer(outcome)

    def all_succeeded(self, outcomes: Sequence[Outcome]) -> None:
        """Release the entries of successes that were written: `settled` for a whole window."""
        release = self._held.pop
        for outcome in outcomes:
            delivery = outcome.delivery
            if delivery.when_done is not None:
                delivery.done()
            release(delivery.entry_id, None)

    def lost(self, entry_ids: Sequence[bytes]) -> None:
        """Release entries whose leases are lost: drop those that wait, let running ones finish."""
        for entry_id in entry_ids:
            delivery = self._held.get(entry_id)
            if delivery is None or delivery.has_outcome:
                continue  # settled, or about to be: the entry is gone because we acknowledged it
            delivery.is_lost = True
            if not delivery.is_running:
                del self._held[entry_id]
            logger.warning("lost the lease of job %s (entry %s)", delivery.job.id, entry_id.decode())

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Hand back entries that were not started, so that other workers run them."""
        for start in range(0, len(deliveries), HAND_BACK_BATCH):
            batch = deliveries[start : start + HAND_BACK_BATCH]
            await self._hand_back([delivery.entry_id for delivery in batch])
            if self._queue.gate is not None:
                # Suspects stay pending, and so do their slots.
                self._queue.gate.returned([delivery.entry_id for delivery in batch if not delivery.is_suspect])
            for delivery in batch:
                self._held.pop(delivery.entry_id, None)

    async def hand_back_undelivered(self, before: float | None = None) -> None:
        """Hand back entries whose delivery never arrived: pending for this consumer, but not held here.

        Left until its lease expires, such an entry would count as delivered twice. One delivered after `before`, by the
        monotonic clock, may be in the reply to the read that was sent then.
        """
        limit = len(self._held) + max(self._config.batch, MAX_UNDELIVERED)
        pending = await self._client.call(
            "XPENDING", self._keys.stream, self._config.group, "-", "+", limit, self._config.consumer_id
        )
        # Measured after the reply: the server may have been slow to run XPENDING.
        newest_ms = -1.0 if before is None else (time.monotonic() - before) * 1000 + CLOCK_MARGIN_MS
        # An entry with earlier deliveries may have run: leave it until its lease expires.
        undelivered = [
            entry_id
            for entry_id, _, idle_ms, deliveries in pending
            if deliveries == 1 and idle_ms > newest_ms and entry_id not in self._held
        ]
        for start in range(0, len(undelivered), HAND_BACK_BATCH):
            # Meanwhile a takeover may have found them, as their leases had run out: then they run here.
            await self._hand_back(undelivered[start : start + HAND_BACK_BATCH], most_deliveries=1)

    async def _hand_back(self, entry_ids: list[bytes], most_deliveries: int = 0) -> None:
        await calls.hand_back(
            self._client,
            self._keys.stream,
            group=self._config.group,
            consumer=self._config.consumer_id,
            has_xackdel=self.has_xackdel,
            most_deliveries=most_deliveries,
            min_idle_ms=self._config.claim_min_idle_ms,
            entry_ids=entry_ids,
        )
