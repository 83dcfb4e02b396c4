"""Looks at each entry as it comes in: a job that may run, or a dead letter with all that is known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.clock import wall_clock_ms
from tampu.engine import outcomes
from tampu.engine.delivery import Delivery
from tampu.engine.runner import max_attempts_of
from tampu.errors import DecodeError
from tampu.wire.dlq import MISSING_PAYLOAD, DlqReason
from tampu.wire.entry import first_values, read_job_fields, text_or_empty
from tampu.wire.envelope import decode_job
from tampu.wire.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.engine.config import ConsumerConfig
    from tampu.engine.settle import Settler


class WorkerLost(Exception):  # noqa: N818 - what dead letters show as the error's type
    """Stands for the error nobody could report: the worker died with the job, or lost its lease."""


class Intake:
    """Turns entries into deliveries and keeps those in `held` until they are settled."""

    def __init__(
        self,
        config: ConsumerConfig,
        settler: Settler,
        held: dict[bytes, Delivery],
        decode_payload: Callable[[bytes], Any] | None,
    ) -> None:
        self._config = config
        self._settler = settler
        self._held = held
        self._decode_payload = decode_payload

    def receive(self, entry_id: bytes, fields: list[bytes], earlier_deliveries: int) -> Delivery | None:
        """The delivery of one entry; None when it is not to be run."""
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
        job.attempt += earlier_deliveries
        delivery = Delivery(entry_id, job, earlier_deliveries)
        self._held[entry_id] = delivery
        if job.attempt >= max_attempts_of(job, self._config):
            self._exhausted(delivery)
            return None
        return delivery

    def _exhausted(self, delivery: Delivery) -> None:
        error = None
        if delivery.is_suspect:
            error = WorkerLost("the worker that ran it last died, or lost its lease")
        delivery.has_outcome = True
        self._settler.add(
            outcomes.dead_letter(
                delivery,
                wall_clock_ms(),
                0,
                reason=DlqReason.RETRIES_EXHAUSTED,
                worker=self._config.consumer_id,
                error=error,
                ran=False,
            )
        )

    def _reject(
        self, entry_id: bytes, reason: DlqReason, fields: list[bytes], error: BaseException | None = None
    ) -> None:
        values = first_values(fields)
        is_malformed = reason is DlqReason.MALFORMED
        job: Job[Any] = Job.from_wire("", b"\xc0", 0, 0, None, text_or_empty(values.get(b"n")))
        self._held[entry_id] = delivery = Delivery(entry_id, job, 0)
        delivery.has_outcome = True
        self._settler.add(
            outcomes.dead_letter(
                delivery,
                wall_clock_ms(),
                0,
                reason=reason,
                worker=self._config.consumer_id,
                error=error,
                detail=MISSING_PAYLOAD if is_malformed else None,
                ran=False,
                envelope=values.get(b"d", b""),
                original=tuple(zip(fields[::2], fields[1::2], strict=False)) if is_malformed else None,
            )
        )
