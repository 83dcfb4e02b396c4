"""Marks of jobs that are to be cancelled, as a worker remembers them."""

from __future__ import annotations

from typing import Any

import pytest

from tampu import Job
from tampu.consume.admission import Cancels
from tampu.consume.inflight import Delivery
from tampu.wire.keys import QueueKeys


@pytest.mark.parametrize(("mark", "reason"), [(b"rby the user", "by the user"), (b"cby the user", None), (None, None)])
async def test_a_mark_that_was_carried_out_or_is_gone_cancels_nothing(mark: bytes | None, reason: str | None) -> None:
    """A peer may add the ID of a cancelled job again: it does not remove the mark."""

    class Client:
        async def call(self, *command: str) -> bytes | None:
            return mark

    client: Any = Client()
    nothing: Any = None
    cancels = Cancels(client, QueueKeys("q"), nothing, nothing)
    cancels.marked.add("job-1")
    delivery = Delivery(b"1-0", Job("job-1"), 0)
    assert await cancels.reason_for(delivery) == reason
    assert cancels.marked == (set() if reason is None else {"job-1"})
