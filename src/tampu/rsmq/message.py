"""What comes back from a queue: a message, and the queue's attributes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from tampu.rsmq.ids import sent_ms
from tampu.rsmq.units import looks_like_milliseconds
from tampu.rsmq.validate import DurationUnit, parse_int

if TYPE_CHECKING:
    from collections.abc import Sequence

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class RsmqMessage(Generic[T_co]):
    """A message that was received or popped."""

    #: What `delete_message` and `change_message_visibility` want.
    id: str
    #: The decoded body. Without a decoder it is text, read as JavaScript reads it: bytes that are no UTF-8 are
    #: replaced; `body` has them.
    message: T_co
    #: How often it was received, this time included.
    rc: int
    #: When it was first received: Unix time in ms (in microseconds with `precision="us"`).
    fr: int
    #: The bytes as they were sent.
    body: bytes

    @property
    def sent(self) -> float:
        """When it was sent: Unix time in ms, with the microseconds as a fraction."""
        return sent_ms(self.id)


@dataclass(frozen=True, slots=True)
class QueueAttributes:
    """The attributes and counters of a queue."""

    #: For how long a received message is hidden, in seconds.
    vt: float
    #: For how long a new message is hidden, in seconds.
    delay: float
    #: Most bytes of a message; -1 = no limit.
    maxsize: int
    #: How often messages were received, ever; repeats included.
    totalrecv: int
    #: How many messages were sent, ever.
    totalsent: int
    #: When the queue was created and last changed: Unix time in seconds.
    created: int
    modified: int
    #: Messages in the queue, hidden ones included.
    msgs: int
    #: Hidden messages as JavaScript counts them: those that became visible within the current second included.
    hiddenmsgs: int
    #: Messages that can be received right now, exactly.
    visiblemsgs: int
    #: Whether `vt` or `delay` look like the milliseconds that Rust's rsmq_async (8.0 and later) writes. JavaScript and
    #: this client, by default, take them for seconds: 1000 times too long. See `RsmqOptions.duration_unit`.
    looks_like_milliseconds: bool = False

    @classmethod
    def from_reply(cls, reply: Sequence[bytes | int | None], unit: DurationUnit) -> QueueAttributes:
        """From what `rsmq_attributes.lua` answers."""
        vt, delay = (seconds(value, unit) for value in reply[:2])
        maxsize, totalrecv, totalsent, created, modified = (_whole(value) for value in reply[2:7])
        msgs, hidden, visible = (int(value or 0) for value in reply[7:])
        suspicious = unit == "s" and looks_like_milliseconds(vt, delay)
        return cls(
            vt, delay, maxsize, totalrecv, totalsent, created, modified, msgs, hidden, visible, suspicious
        )  # fmt: skip


def seconds(value: bytes | int | None, unit: DurationUnit) -> float:
    """A duration of the hash in seconds; NaN if it is no number."""
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
