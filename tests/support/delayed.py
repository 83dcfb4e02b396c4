"""Members of the delayed set as producers write them, added directly so that a test decides when they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import encode_envelope
from tampu.wire.payload import encode_slot

if TYPE_CHECKING:
    from support.queues import QueueView

#: In 1970: due according to any clock.
LONG_AGO_MS = 1_000_000


def member_of(job_id: str, name: str = "", payload: Any = None) -> bytes:
    return encode_delayed_member(name, encode_envelope(job_id, encode_slot(payload, "bin"), 1_700_000_000_000))


def delay(view: QueueView, member: bytes, due_ms: float = LONG_AGO_MS) -> bytes:
    view.client.zadd(view.keys.delayed, {member: due_ms})
    return member
