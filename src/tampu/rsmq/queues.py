"""Operations on queues: create, list, delete, and get or set attributes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.redis.connection import pack_command
from tampu.rsmq.errors import NoAttributeSupplied, QueueExists, QueueNotFound
from tampu.rsmq.options import (
    MAX_MAXSIZE,
    Duration,
    DurationUnit,
    check_maxsize,
    looks_like_milliseconds,
    parse_int,
)
from tampu.rsmq.session import ATTRIBUTES, CREATE, DROP, Session

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_VT_SECS = 30
DEFAULT_DELAY_SECS = 0
DEFAULT_MAXSIZE = MAX_MAXSIZE


@dataclass(frozen=True, slots=True)
class QueueAttributes:
    """The attributes and counters of a queue."""

    #: How long a received message is hidden, in seconds.
    vt: float
    #: How long a new message is hidden, in seconds.
    delay: float
    #: Maximum size of a message in bytes; -1 = no limit.
    maxsize: int
    #: Total number of receives, including repeated ones.
    totalrecv: int
    #: Total number of messages sent.
    totalsent: int
    #: When the queue was created and last changed: Unix time in seconds.
    created: int
    modified: int
    #: Messages in the queue, including hidden ones.
    msgs: int
    #: Hidden messages as JavaScript counts them: including those that became visible within the current second.
    hiddenmsgs: int
    #: Messages that can be received right now.
    visiblemsgs: int
    #: True if `vt` or `delay` look like milliseconds, which Rust's rsmq_async (8.0 and later) writes. JavaScript and
    #: this client, by default, read them as seconds: 1000 times too long. See `RsmqOptions.duration_unit`.
    looks_like_milliseconds: bool = False

    @classmethod
    def from_reply(cls, reply: Sequence[bytes | int | None], unit: DurationUnit) -> QueueAttributes:
        """Read the reply of `rsmq_attributes.lua`."""
        vt, delay = (_seconds(value, unit) for value in reply[:2])
        maxsize, totalrecv, totalsent, created, modified = (_whole(value) for value in reply[2:7])
        msgs, hidden, visible = (int(value or 0) for value in reply[7:])
        hint = unit == "s" and looks_like_milliseconds(vt, delay)
        return cls(vt, delay, maxsize, totalrecv, totalsent, created, modified, msgs, hidden, visible, hint)


class QueueOperations(Session):
    """Each operation is atomic on the server, and is repeated if the connection breaks."""

    async def create_queue(
        self,
        qname: str,
        vt: Duration | None = DEFAULT_VT_SECS,
        delay: Duration | None = DEFAULT_DELAY_SECS,
        maxsize: int | None = DEFAULT_MAXSIZE,
    ) -> bool:
        """Create a queue and return True.

        `vt` is how long a received message is hidden, `delay` how long a new one is, in seconds (0 to 9999999).
        `maxsize` is the largest message in bytes, 1024 to 65536, or -1 for no limit. None means the default.

        Raises `QueueExists`, and changes nothing, if the queue exists; `InvalidFormat` or `InvalidValue` for invalid
        arguments. After a lost connection, `QueueExists` may mean that this call created the queue.
        """
        queue = self._queues[qname]
        attributes = (
            self._checked("vt", DEFAULT_VT_SECS if vt is None else vt),
            self._checked("delay", DEFAULT_DELAY_SECS if delay is None else delay),
            check_maxsize(DEFAULT_MAXSIZE if maxsize is None else maxsize),
        )
        if not await self._ask(CREATE.packed_call([queue.hash, self._queues.index], [*attributes, queue.name])):
            raise QueueExists(queue.name)
        return True

    async def list_queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        names: list[bytes] = await self._ask(pack_command(("SMEMBERS", self._queues.index)))
        return sorted(name.decode(errors="replace") for name in names)

    async def delete_queue(self, qname: str) -> bool:
        """Delete a queue with all its messages and return True. Raises `QueueNotFound` if it does not exist.

        After a lost connection, `QueueNotFound` may mean that this call deleted the queue.
        """
        queue = self._queues[qname]
        if not await self._ask(DROP.packed_call([*queue.both, self._queues.index], [queue.name])):
            raise QueueNotFound(queue.name)
        return True

    async def get_queue_attributes(self, qname: str) -> QueueAttributes:
        """Return the attributes and counters of a queue. Raises `QueueNotFound`."""
        return await self._attributes(qname, [])

    async def set_queue_attributes(
        self,
        qname: str,
        vt: Duration | None = None,
        maxsize: int | None = None,
        delay: Duration | None = None,
    ) -> QueueAttributes:
        """Change the given attributes and return all of them. Messages already in the queue keep their times.

        Raises `NoAttributeSupplied`, `InvalidValue` or `QueueNotFound`.
        """
        if vt is None and maxsize is None and delay is None:
            raise NoAttributeSupplied
        _ = self._queues[qname]  # JavaScript checks the name first
        changes: list[str | int] = []
        if vt is not None:
            changes += ("vt", self._checked("vt", vt))
        if maxsize is not None:
            changes += ("maxsize", check_maxsize(maxsize))
        if delay is not None:
            changes += ("delay", self._checked("delay", delay))
        return await self._attributes(qname, changes)

    async def _attributes(self, qname: str, changes: list[str | int]) -> QueueAttributes:
        queue = self._queues[qname]
        arguments = [self._options.precision, *changes]
        reply = await self._ask(ATTRIBUTES.packed_call(queue.both, arguments))
        if reply is None:
            raise QueueNotFound(queue.name)
        if not changes:
            self._check_unit(queue, "vt", reply[0])
            self._check_unit(queue, "delay", reply[1] or b"")
        return QueueAttributes.from_reply(reply, self._options.unit)


def _seconds(value: bytes | int | None, unit: DurationUnit) -> float:
    """Return a duration of the hash in seconds; NaN if it is not a number."""
    number = parse_int(_as_text(value))
    if number is None:
        return math.nan
    if unit == "s":
        return number
    return number / 1000 if number % 1000 else number // 1000


def _whole(value: bytes | int | None) -> int:
    return parse_int(_as_text(value)) or 0


def _as_text(value: bytes | int | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
