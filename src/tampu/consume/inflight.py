"""Entries in flight: delivered to this consumer, and neither settled, handed back nor lost. Sole owner of that state.

```
receive ──► held ──► settled           written and acknowledged
              ├────► handed back       not started: another worker runs it
              └────► lost              another worker owns it by now
```
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from tampu.base.clock import wall_clock_ms
from tampu.consume import outcomes
from tampu.consume.runner import max_attempts_of
from tampu.errors import DecodeError
from tampu.metrics import DlqRouted, RetryScheduled, tell
from tampu.redis import calls
from tampu.redis.calls import START_MARK
from tampu.redis.codes import OutcomeKind, SettleCode
from tampu.wire.dlq import MISSING_PAYLOAD, DlqReason
from tampu.wire.entry import first_values, read_job_fields, text_or_empty
from tampu.wire.envelope import decode_job
from tampu.wire.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tampu.config import ConsumerConfig
    from tampu.consume.outcomes import Outcome
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

logger = logging.getLogger("tampu.worker")

#: Deaths of workers with an entry running alone, before it is a dead letter.
LONE_DEATHS = 3
#: Deaths in all: two in company (see `takeover.py`), the first one alone, and then as many as the limit says.
MAX_DEATHS = 3 + LONE_DEATHS
#: Entries handed back in one call.
HAND_BACK_BATCH = 100
#: Entries in our name that are looked through, beside those we hold.
MAX_UNDELIVERED = 1000
#: How much a server's count of idle time may differ from ours, in milliseconds.
CLOCK_MARGIN_MS = 50

# Globals: these are compared for every job, and looking up a member of an enum takes ten times as long.
_SUCCESS, _RESULT, _WRITTEN = OutcomeKind.SUCCESS, OutcomeKind.RESULT, SettleCode.WRITTEN


class WorkerLost(Exception):  # noqa: N818 - what dead letters show as the error's type
    """Stands for an error that could not be reported: the worker died with the job, or lost its lease."""


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
        "when_done",
    )

    def __init__(self, entry_id: bytes, job: Job[Any], earlier_deliveries: int) -> None:
        self.entry_id = entry_id
        #: Its `attempt` counts the runs before this one: the envelope's, plus earlier deliveries of this entry.
        self.job = job
        self.earlier_deliveries = earlier_deliveries
        #: No attempt is left after this one: its start is recorded on the server.
        self.is_last_attempt = False
        self.is_running = False
        #: The handler has ended; the outcome only has to be written.
        self.has_outcome = False
        #: Another worker owns it by now: if it waits here it must not start; if it runs, its failure does not count.
        self.is_lost = False
        #: Set by a takeover: called once when it is settled or lost.
        self.when_done: Callable[[], object] | None = None

    @property
    def is_suspect(self) -> bool:
        """True if it was delivered before: it may be a job that kills its worker."""
        return self.earlier_deliveries > 0

    def done(self) -> None:
        """Note that it is settled, lost, or that the server refused to write its outcome."""
        if self.when_done is not None:
            self.when_done()
            self.when_done = None


class InFlight:
    """The entries in flight of one consumer. Only the event loop's thread changes it; the lease thread reads copies."""

    def __init__(
        self,
        client: Client,
        keys: QueueKeys,
        config: ConsumerConfig,
        reject: Callable[[Outcome], None],
        decode_payload: Callable[[bytes], Any] | None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._config = config
        #: Takes the dead letter of an entry that may not run.
        self._reject_with = reject
        self._decode_payload = decode_payload
        self._held: dict[bytes, Delivery] = {}
        #: True when the server has XACKDEL.
        self.has_xackdel = False

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the entry ids. The copy is one step to other threads, whatever the event loop does meanwhile."""
        return iter(self._held.copy())

    def running(self) -> list[Job[Any]]:
        """Return the jobs whose handlers are running."""
        held = self._held.copy().values()
        return [delivery.job for delivery in held if delivery.is_running and not delivery.has_outcome]

    # --- coming in

    def receive(self, entry_id: bytes, fields: list[bytes], earlier_deliveries: int) -> Delivery | None:
        """Take in one entry. Return its delivery, or None if it must not run: then it becomes a dead letter."""
        if entry_id in self._held:
            return None  # it runs here already
        envelope, name = read_job_fields(fields)
        if envelope is None:
            self._reject(entry_id, DlqReason.MALFORMED, fields)
            return None
        if len(envelope) > self._config.max_payload_bytes:
            self._reject(entry_id, DlqReason.OVERSIZE_PAYLOAD, fields)
            return None
        try:
            job = decode_job(envelope, name)
        except DecodeError as error:
            self._reject(entry_id, DlqReason.DECODE_FAILED, fields, error.with_traceback(None))
            return None
        if self._decode_payload is not None:
            job._decode = self._decode_payload
        delivery = Delivery(entry_id, job, earlier_deliveries)
        self._held[entry_id] = delivery
        attempts_left = max_attempts_of(job, self._config) - job.attempt
        if (earlier_deliveries or attempts_left <= 1) and self._is_over(delivery, attempts_left):
            self._exhausted(delivery)
            return None
        return delivery

    def _is_over(self, delivery: Delivery, attempts_left: int) -> bool:
        """Return True if a job must not run again: its attempts are used up, or its workers died too often."""
        has_begun = delivery.earlier_deliveries >= START_MARK
        if has_begun:
            delivery.earlier_deliveries -= START_MARK
        deaths = delivery.earlier_deliveries
        delivery.is_last_attempt = attempts_left == 1
        # What never began its last attempt only waited in workers that died, however often.
        is_poison = not delivery.is_last_attempt and deaths >= min(MAX_DEATHS, attempts_left + LONE_DEATHS)
        if has_begun or attempts_left <= 0 or is_poison:
            delivery.job.attempt += deaths
            return True
        return False

    def _exhausted(self, delivery: Delivery) -> None:
        error = None
        if delivery.is_suspect:
            deaths = delivery.earlier_deliveries
            error = WorkerLost(f"workers died, or lost their leases, while they had it: {deaths} so far")
        self._bury(delivery, reason=DlqReason.RETRIES_EXHAUSTED, error=error)

    def _reject(
        self, entry_id: bytes, reason: DlqReason, fields: list[bytes], error: BaseException | None = None
    ) -> None:
        values = first_values(fields)
        is_malformed = reason is DlqReason.MALFORMED
        job: Job[Any] = Job.from_wire("", b"\xc0", 0, 0, None, text_or_empty(values.get(b"n")))
        self._held[entry_id] = delivery = Delivery(entry_id, job, 0)
        self._bury(
            delivery,
            reason=reason,
            error=error,
            detail=MISSING_PAYLOAD if is_malformed else None,
            envelope=values.get(b"d", b""),
            original=tuple(zip(fields[::2], fields[1::2], strict=False)) if is_malformed else None,
        )

    def _bury(self, delivery: Delivery, **letter: Any) -> None:
        delivery.has_outcome = True
        worker = self._config.consumer_id
        self._reject_with(outcomes.dead_letter(delivery, wall_clock_ms(), 0, worker=worker, ran=False, **letter))

    # --- going out

    def settled(self, outcome: Outcome, code: str) -> None:
        """Release an entry whose outcome the server has answered with `code`, and count retries and dead letters."""
        delivery = outcome.delivery
        self._held.pop(delivery.entry_id, None)
        if outcome.kind is _SUCCESS or outcome.kind is _RESULT or code != _WRITTEN:
            return
        metrics, name = self._config.metrics, delivery.job.name
        if outcome.dlq_reason is not None:
            tell(metrics.dlq_routed, DlqRouted(outcome.dlq_reason, outcome.runs, name))
        else:
            tell(metrics.retry_scheduled, RetryScheduled(outcome.runs + 1, outcome.extra[1], name))

    def lost(self, entry_ids: Sequence[bytes]) -> None:
        """Release entries whose leases are gone: what waits is dropped, what runs is left to finish."""
        for entry_id in entry_ids:
            delivery = self._held.get(entry_id)
            if delivery is None or delivery.has_outcome:
                continue  # settled, or about to be: then its entry is gone because of us
            delivery.is_lost = True
            if not delivery.is_running:
                del self._held[entry_id]
            logger.warning("the lease of job %s (%s) was lost", delivery.job.id, entry_id.decode())

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back entries that were not started, so that other workers run them."""
        for start in range(0, len(deliveries), HAND_BACK_BATCH):
            batch = deliveries[start : start + HAND_BACK_BATCH]
            await self._hand_back([(delivery.entry_id, b"") for delivery in batch])
            for delivery in batch:
                self._held.pop(delivery.entry_id, None)

    async def hand_back_undelivered(self, since: float, before: float | None = None) -> None:
        """Give back what the server sent in a reply that never came: pending in our name, and not held here.

        Left to the lease it would count as delivered once more. Both times are by the monotonic clock. What was
        delivered before `since` belonged to another worker of the same name, which may have died of it; what was
        delivered after `before` may be in the reply to the read that was sent then.
        """
        oldest_ms = (time.monotonic() - since) * 1000 + CLOCK_MARGIN_MS
        most = len(self._held) + max(self._config.batch, MAX_UNDELIVERED)
        pending = await self._client.call(
            "XPENDING", self._keys.stream, self._config.group, "-", "+", most, self._config.consumer_id
        )
        # By the time after the reply: the server may have been slow to look.
        newest_ms = -1.0 if before is None else (time.monotonic() - before) * 1000 + CLOCK_MARGIN_MS
        # One that was delivered before, and taken over in such a reply, may have run: its lease decides.
        undelivered = [
            (entry_id, b"")
            for entry_id, _, idle_ms, deliveries in pending
            if deliveries == 1 and newest_ms < idle_ms <= oldest_ms and entry_id not in self._held
        ]
        for start in range(0, len(undelivered), HAND_BACK_BATCH):
            # Meanwhile a takeover may have found them, as their leases had run out: then they run here.
            await self._hand_back(undelivered[start : start + HAND_BACK_BATCH], most_deliveries=1)

    async def _hand_back(self, entries: list[tuple[bytes, bytes]], most_deliveries: int = 0) -> None:
        await calls.hand_back(
            self._client,
            self._keys.stream,
            group=self._config.group,
            consumer=self._config.consumer_id,
            has_xackdel=self.has_xackdel,
            most_deliveries=most_deliveries,
            entries=entries,
        )
