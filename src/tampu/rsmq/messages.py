"""The operations on messages: send, receive, pop, delete, change the visibility.

What holds when the connection breaks under way:

| operation | then |
|---|---|
| `send_message` | `OutcomeUnknownError`, or with `send_once=True` it is repeated and done once |
| `receive_message` | repeated; a message that the first run had taken reappears after its vt: nothing is lost |
| `pop_message` | `OutcomeUnknownError`: a message may have been taken out, and is lost then (at most once) |
| `delete_message` | repeated; gone is gone, but the answer may be False though this call deleted it |
| `change_message_visibility` | repeated; the last one counts |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from tampu.errors import OutcomeUnknownError
from tampu.redis.faults import ConnectionLost
from tampu.rsmq.codec import Decoder, Encoder, decode, decode_text, encode
from tampu.rsmq.errors import QueueNotFound
from tampu.rsmq.sending import Sending
from tampu.rsmq.taking import Taking
from tampu.rsmq.validate import Duration, check_duration, check_id

if TYPE_CHECKING:
    from tampu.rsmq.keys import QueueKeys
    from tampu.rsmq.message import RsmqMessage

T = TypeVar("T")


class MessageOperations(Sending, Taking):
    """Each is one step on the server."""

    @overload
    async def send_message(self, qname: str, message: str | bytes, delay: Duration | None = None) -> str: ...

    @overload
    async def send_message(
        self, qname: str, message: T, delay: Duration | None = None, *, encoder: Encoder[T]
    ) -> str: ...

    async def send_message(
        self, qname: str, message: Any, delay: Duration | None = None, *, encoder: Encoder[Any] | None = None
    ) -> str:
        """Put a message into a queue and give its id. `delay` in seconds; None = the queue's own.

        A send that returned is on the server. One whose connection broke raises `OutcomeUnknownError`: it may be there
        or not, and a second try may double it; `RsmqOptions(send_once=True)` makes that impossible.
        """
        queue = self._queues[qname]
        checked_delay = None if delay is None else check_duration("delay", delay, self._options.unit)
        body, size = encode(message, encoder, self._options.size_unit)
        return await self._send_one(queue, body, size, checked_delay)

    @overload
    async def receive_message(self, qname: str, vt: Duration | None = None) -> RsmqMessage[str] | None: ...

    @overload
    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[T]
    ) -> RsmqMessage[T] | None: ...

    async def receive_message(
        self, qname: str, vt: Duration | None = None, *, decoder: Decoder[Any] = decode_text
    ) -> RsmqMessage[Any] | None:
        """The next message, hidden from others for `vt` seconds (None = the queue's own), or None if there is none.

        Delete it when it is done with; otherwise it comes again: at least once. A second `receive` of somebody else
        after `vt` has passed gets the same message, whether this one is still at work or not.
        """
        queue = self._queues[qname]
        found, _ = await self._take_one(queue, None if vt is None else check_duration("vt", vt, self._options.unit))
        return decode(found, decoder) if found else None

    @overload
    async def pop_message(self, qname: str) -> RsmqMessage[str] | None: ...

    @overload
    async def pop_message(self, qname: str, *, decoder: Decoder[T]) -> RsmqMessage[T] | None: ...

    async def pop_message(self, qname: str, *, decoder: Decoder[Any] = decode_text) -> RsmqMessage[Any] | None:
        """Take the next message out of the queue for good, or None if there is none: at most once.

        Whatever happens to the caller from here on, the message does not come again. Do not put a timeout around it:
        a pop that is cancelled under way loses its message.
        """
        queue = self._queues[qname]
        try:
            found, _ = await self._take_one(queue, "pop")
        except ConnectionLost as error:
            raise OutcomeUnknownError(
                f"{error}; a message may have been popped from queue {queue.name!r}, and is lost then"
            ) from error
        return decode(found, decoder) if found else None

    async def delete_message(self, qname: str, id: str) -> bool:  # noqa: A002 - the name in every other client
        """Delete a message, received or not; False if there is none (or no such queue).

        There is no receipt: after its vt the message may be in other hands, and is deleted all the same.
        """
        queue = self._queues[qname]
        return await self._delete_one(queue, check_id(id))

    async def change_message_visibility(
        self,
        qname: str,
        id: str,  # noqa: A002 - the name in every other client
        vt: Duration,
    ) -> bool:
        """Hide a message for `vt` seconds from now; 0 shows it at once, behind what waits already. False: gone."""
        queue = self._queues[qname]
        message_id = check_id(id)
        reply = await self._ask(self._calls.visibility(queue, message_id, check_duration("vt", vt, self._options.unit)))
        if reply is None:
            raise QueueNotFound(queue.name)
        return bool(reply)

    # How one message travels; a client whose callers share a connection lets several travel together.

    async def _send_one(self, queue: QueueKeys, body: bytes, size: int | None, delay: int | None) -> str:
        return (await self._put(queue, [body], size, delay))[0]

    async def _delete_one(self, queue: QueueKeys, message_id: str) -> bool:
        return (await self._delete(queue, [message_id]))[0]
