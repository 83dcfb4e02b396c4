"""Many messages in one round trip: send, receive and delete in batches.

A batch goes out in steps of at most 256 messages and 256 KiB, each atomic, one after the other: a longer script would
hold up everybody else on the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from tampu.checks import check_int
from tampu.errors import Error
from tampu.rsmq.codec import Decoder, Encoder, decode, decode_text, encode
from tampu.rsmq.errors import RsmqError
from tampu.rsmq.sending import Sending
from tampu.rsmq.taking import Fields, Taking
from tampu.rsmq.validate import Duration, check_duration, check_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tampu.rsmq.message import RsmqMessage

T = TypeVar("T")

#: Most messages, and most bytes of bodies, in one step. A larger message travels alone.
STEP_MESSAGES = 256
STEP_BYTES = 256 * 1024
DEFAULT_MAX = 10


class BatchInterrupted(RsmqError):  # noqa: N818 - what happened
    """A batch of sends failed after some of its steps were done; `ids` are those of the messages that are in.

    They are the first ones of the batch. `__cause__` says what happened to the others.
    """

    name = "batchInterrupted"

    def __init__(self, ids: Sequence[str], total: int, cause: Error) -> None:
        super().__init__(f"{len(ids)} of {total} messages were sent, then: {cause}")
        self.ids = list(ids)


class BatchOperations(Sending, Taking):
    """The batches, on any session."""

    @overload
    async def send_messages(
        self, qname: str, messages: Iterable[str | bytes], delay: Duration | None = None
    ) -> list[str]: ...

    @overload
    async def send_messages(
        self, qname: str, messages: Iterable[T], delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> list[str]: ...

    async def send_messages(
        self, qname: str, messages: Iterable[Any], delay: Duration | None = None, *, encoder: Encoder[Any] | None = None
    ) -> list[str]:
        """Send messages in this order and give their ids. All are checked, also against `maxsize`, before any is sent.

        Up to 256 messages (256 KiB) are sent in one step, all or none. If a later step fails, `BatchInterrupted` tells
        the ids of those that are in; a lost connection is as for `send_message`.
        """
        queue = self._queues[qname]
        checked_delay = None if delay is None else check_duration("delay", delay, self._options.unit)
        encoded = [encode(message, encoder, self._options.size_unit) for message in messages]
        sizes = [len(body) if size is None else size for body, size in encoded]
        ids: list[str] = []
        for bodies in _steps([body for body, _ in encoded]):
            try:
                # The largest of all: a message that is too long is found out in the first step.
                ids += await self._put(queue, bodies, max(sizes), checked_delay)
            except Error as error:
                if not ids:
                    raise
                raise BatchInterrupted(ids, len(encoded), error) from error
        return ids

    @overload
    async def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None
    ) -> list[RsmqMessage[str]]: ...

    @overload
    async def receive_messages(
        self, qname: str, max: int = DEFAULT_MAX, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> list[RsmqMessage[T]]: ...

    async def receive_messages(
        self,
        qname: str,
        max: int = DEFAULT_MAX,  # noqa: A002 - the name of the API
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
    ) -> list[RsmqMessage[Any]]:
        """Up to `max` messages that are due, each hidden for `vt` seconds (None = the queue's own); [] if none.

        Fewer than `max` do not mean that the queue is empty: a step ends at 256 KiB. The vt of all begins now, so take
        no more than can be done with in that time.
        """
        queue = self._queues[qname]
        check_int("max", max, low=1)
        checked_vt = None if vt is None else check_duration("vt", vt, self._options.unit)
        found: list[Fields] = []
        while (missing := max - len(found)) > 0:
            step = min(missing, STEP_MESSAGES)
            try:
                taken, _ = await self._take(queue, checked_vt, step)
            except Error:
                if not found:
                    raise
                break  # what is there is hidden from everybody else: the caller must get it
            # With a vt of 0 what was taken stays due, and a second step brings it again.
            repeated = {fields[0] for fields in found[-STEP_MESSAGES:]}.intersection(fields[0] for fields in taken)
            found += [fields for fields in taken if fields[0] not in repeated]
            if repeated or len(taken) < step:
                break
        return [decode(fields, decoder) for fields in found]

    async def delete_messages(self, qname: str, ids: Iterable[str]) -> int:
        """Delete these messages; how many of them there were. Repeated when the connection breaks under way."""
        queue = self._queues[qname]
        checked = [check_id(message_id) for message_id in ids]
        deleted = 0
        for at in range(0, len(checked), STEP_MESSAGES):
            deleted += sum(await self._delete(queue, checked[at : at + STEP_MESSAGES]))
        return deleted


def _steps(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    step: list[bytes] = []
    size = 0
    for body in bodies:
        if step and (len(step) == STEP_MESSAGES or size + len(body) > STEP_BYTES):
            yield step
            step, size = [], 0
        step.append(body)
        size += len(body)
    if step:
        yield step
