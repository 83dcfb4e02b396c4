"""Receive, pop and delete messages, and change their visibility.

If the connection breaks during an operation:

| operation | what happens |
|---|---|
| `receive_message` | repeated; a message that the first attempt received reappears after its vt, so nothing is lost |
| `pop_message` | raises `OutcomeUnknownError`: a message may have been removed and is then lost (at most once) |
| `delete_message` | repeated; the second attempt may return False although the first one deleted the message |
| `change_message_visibility` | repeated; the last attempt wins |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from tampu.base.checks import MAX_CALL_ENTRIES, check_int, split_into_calls
from tampu.errors import Error, OutcomeUnknownError
from tampu.redis.faults import ConnectionLost
from tampu.rsmq.errors import QueueNotFound
from tampu.rsmq.message import Decoder, decode, decode_text
from tampu.rsmq.options import Duration, check_duration, check_id
from tampu.rsmq.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tampu.rsmq.message import RsmqMessage
    from tampu.rsmq.session import Hiding, QueueKeys

T = TypeVar("T")

DEFAULT_MAX = 10

#: A message as the server replies it: ID, body, receive count, first received.
RawMessage = list[Any]
#: A message, or None; and the seconds until the next one is due, -1 if there is none.
Received = tuple[RawMessage | None, float]


class ReceiveOperations(Session):
    """Receives one message, or many, and deletes them."""

    @overload
    async def receive_message(self, qname: str, vt: Duration | None = None) -> RsmqMessage[str] | None: ...

    @overload
    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> RsmqMessage[T] | None: ...

    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> RsmqMessage[Any] | None:
        """Return the next message, hidden from others for `vt` seconds (None = the queue's `vt`), or None.

        Delete it when it has been processed; otherwise it is received again (at-least-once delivery). After `vt`
        another consumer receives the same message, even if this one is still processing it. Raises `QueueNotFound`,
        and `CannotDecodeMessage` if `decoder` fails.
        """
        queue = self._queues[qname]
        found, _ = await self._receive_one(queue, None if vt is None else check_duration("vt", vt, self._options.unit))
        return decode(found, decoder) if found else None

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
        max: int = DEFAULT_MAX,  # noqa: A002 - the public name
        vt: Duration | None = None,
        *,
        decoder: Decoder[Any] = decode_text,
    ) -> list[RsmqMessage[Any]]:
        """Return up to `max` messages that are due, each hidden for `vt` seconds (None = the queue's `vt`).

        Fewer than `max` messages do not mean that the queue is empty: a call returns at most 256 KiB. The vt of all
        messages starts now, so receive no more than you can process in that time.
        """
        queue = self._queues[qname]
        check_int("max", max, low=1)
        checked_vt = None if vt is None else check_duration("vt", vt, self._options.unit)
        found: list[RawMessage] = []
        while (missing := max - len(found)) > 0:
            wanted = min(missing, MAX_CALL_ENTRIES)
            try:
                received, _ = await self._receive(queue, checked_vt, wanted)
            except Error:
                if not found:
                    raise
                break  # the messages received so far are hidden from others: the caller must get them
            # With a vt of 0 the messages stay due, and the next call returns them again.
            repeated = {raw[0] for raw in found[-MAX_CALL_ENTRIES:]}.intersection(raw[0] for raw in received)
            found += [raw for raw in received if raw[0] not in repeated]
            if repeated or len(received) < wanted:
                break
        return [decode(raw, decoder) for raw in found]

    @overload
    async def pop_message(self, qname: str) -> RsmqMessage[str] | None: ...

    @overload
    async def pop_message(self, qname: str, *, decoder: Decoder[T]) -> RsmqMessage[T] | None: ...

    async def pop_message(self, qname: str, *, decoder: Decoder[Any] = decode_text) -> RsmqMessage[Any] | None:
        """Remove the next message from the queue and return it; None if there is none. At-most-once delivery.

        If the caller fails, the message is lost. Do not wrap this call in a timeout: cancelling a pop in flight loses
        its message. Raises `QueueNotFound`, and `OutcomeUnknownError` if the connection breaks.
        """
        queue = self._queues[qname]
        try:
            found, _ = await self._receive_one(queue, "pop")
        except ConnectionLost as error:
            raise OutcomeUnknownError(
                f"{error}; a message may have been popped from queue {queue.name!r} and lost"
            ) from error
        return decode(found, decoder) if found else None

    async def delete_message(self, qname: str, id: str) -> bool:  # noqa: A002 - the name in every other client
        """Delete a message, received or not. Return False if the message or the queue does not exist.

        There is no receipt handle: the message is deleted even if its vt has passed and another consumer received it.
        """
        queue = self._queues[qname]
        return await self._delete_one(queue, check_id(id))

    async def delete_messages(self, qname: str, ids: Iterable[str]) -> int:
        """Delete messages and return how many of them existed. Repeated if the connection breaks."""
        queue = self._queues[qname]
        checked = [check_id(message_id) for message_id in ids]
        deleted = 0
        for call in split_into_calls((message_id, len(message_id)) for message_id in checked):
            deleted += sum(await self._delete(queue, call))
        return deleted

    async def change_message_visibility(
        self,
        qname: str,
        id: str,  # noqa: A002 - the name in every other client
        vt: Duration,
    ) -> bool:
        """Hide a message for `vt` seconds from now; with 0 it is due at once, after those already due.

        Return False if the message does not exist. Raises `QueueNotFound`.
        """
        queue = self._queues[qname]
        message_id = check_id(id)
        reply = await self._ask(self._calls.visibility(queue, message_id, check_duration("vt", vt, self._options.unit)))
        if reply is None:
            raise QueueNotFound(queue.name)
        return bool(reply)

    # `Rsmq` overrides `_receive_one` and `_delete_one` so that concurrent callers share a call.

    async def _receive_one(self, queue: QueueKeys, vt: Hiding) -> Received:
        found, wait = await self._receive(queue, vt, 1)
        return (found[0] if found else None), wait

    async def _delete_one(self, queue: QueueKeys, message_id: str) -> bool:
        return (await self._delete(queue, (message_id,)))[0]

    async def _receive(self, queue: QueueKeys, vt: Hiding, most: int) -> tuple[list[RawMessage], float]:
        """Receive up to `most` messages in one call, and return the seconds until the next one if none is due."""
        while True:
            # A second pop would lose the message of the first; a second receive only delays it by its vt.
            reply = await self._ask(self._calls.receive(queue, vt, most), resend=vt != "pop")
            if type(reply) is not list:
                self._check_reply(reply, queue, "vt")
            if reply[0]:
                self._check_unit(queue, "vt", reply[0])
            if len(reply) > 2:
                return [reply[at : at + 4] for at in range(1, len(reply), 4)], 0.0
            if reply[1] < 0:
                return [], -1.0
            if reply[1] > 0:
                return [], reply[1] / (1000 if self._options.precision == "ms" else 1_000_000)
            # The script stopped early, at its limit of members without a body: there may be messages after them.

    async def _receive_for_callers(self, queue: QueueKeys, vt: Hiding, callers: int) -> Sequence[Received | Exception]:
        """Receive one message for each of `callers`, if there are enough."""
        outcomes: list[Received | Exception] = []
        while len(outcomes) < callers:
            missing = callers - len(outcomes)
            try:
                found, wait = await self._receive(queue, vt, missing)
            except Exception as error:  # messages received before it belong to the first callers
                return [*outcomes, *[error] * missing]
            outcomes += [(raw, 0.0) for raw in found] or [(None, wait)] * missing
        return outcomes

    async def _delete(self, queue: QueueKeys, message_ids: Sequence[str]) -> list[bool]:
        """Delete messages in one call and return for each ID whether it existed."""
        reply: bytes = await self._ask(self._calls.delete(queue, message_ids))
        return [each == ord("1") for each in reply]
