"""Dead letters are read in pages no larger than the caller's limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.producers import open_producer
from support.proxy import Proxy
from support.queues import QueueView
from tampu.wire.dlq import DlqReason
from tampu.wire.envelope import encode_envelope
from tampu.wire.payload import encode_slot

if TYPE_CHECKING:
    from servers.process import Server

LETTER_BYTES = 2_000


def bury(view: QueueView, count: int, *, readable: bool = True) -> None:
    envelope = encode_envelope("dead", encode_slot("x" * LETTER_BYTES, "bin"), 1_700_000_000_000)
    payload = envelope if readable else b"\xc1" * LETTER_BYTES
    for _ in range(count):
        view.client.xadd(view.keys.dlq, {"d": payload, "source_id": "1-0", "reason": DlqReason.UNRECOVERABLE})


async def test_no_more_letters_are_read_than_the_limit(server: Server) -> None:
    view = QueueView(server, "q")
    bury(view, 30)
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        for call, letters in (
            (producer.peek_dlq(1), 1),
            (producer.peek_dlq(3), 3),
            (producer.replay_dlq(2), 2),
            (producer.remove_dlq(2), 2),
            (producer.peek_dlq(0), 0),
        ):
            before = proxy.link.reply_bytes
            await call
            assert (proxy.link.reply_bytes - before) // LETTER_BYTES == letters
    assert view.client.xlen(view.keys.dlq) == 26


async def test_letters_that_cannot_be_replayed_do_not_hide_the_others(server: Server) -> None:
    view = QueueView(server, "q")
    bury(view, 300, readable=False)
    bury(view, 2)
    async with open_producer(server.url) as producer:
        moved = await producer.replay_dlq(1)
        assert (moved, moved.skipped) == (1, 300)
        assert len(await producer.peek_dlq(1000)) == 301
    assert view.length() == 1
