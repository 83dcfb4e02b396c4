"""Reading, replaying and removing dead letters, by id and by filter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from support.proxy import Proxy
from tampu import Queue
from tampu.errors import ConfigError
from tampu.wire.dlq import DlqEntry, encode_dlq_fields
from tampu.wire.envelope import decode_job, encode_job
from tampu.wire.job import Job
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from support.queues import QueueView
    from tampu.produce.producer import Producer

GARBAGE = b"\xc1 not an envelope"


def bury(
    view: QueueView,
    job: Job[Any] | bytes,
    *,
    reason: str = "retries_exhausted",
    at_ms: int = 0,
    error: str | None = None,
) -> str:
    """Write a dead letter as a worker does and return its id."""
    payload = job if isinstance(job, bytes) else encode_job(job)
    name = "" if isinstance(job, bytes) else job.name
    entry = DlqEntry(dlq_id="", source_id="5-1", reason=reason, payload=payload, name=name, error=error)
    entry_id = f"{at_ms}-1" if at_ms else "*"
    return view.client.execute_command("XADD", view.keys.dlq, entry_id, *encode_dlq_fields(entry)).decode()


def dead(number: int, name: str = "") -> Job[Any]:
    return Job(f"job {number}", name, {"n": number}, attempt=2, created_at_ms=7, retry=JobRetryOverride(5))


def letters(view: QueueView) -> list[str]:
    return [entry_id.decode() for entry_id, _ in view.client.xrange(view.keys.dlq)]


# --- reading


@pytest.mark.servers
async def test_peeking_shows_letters_oldest_first_and_removes_nothing(producer: Producer[Any], view: QueueView) -> None:
    ids = [bury(view, dead(number, "mail" if number % 2 else "")) for number in range(30)]
    found = await producer.peek_dlq()
    assert [entry.dlq_id for entry in found] == ids[:20]
    assert [decode_job(entry.payload).id for entry in found] == [f"job {number}" for number in range(20)]
    assert found[1] == DlqEntry(
        dlq_id=ids[1], source_id="5-1", reason="retries_exhausted", payload=encode_job(dead(1)), name="mail"
    )
    assert len(await producer.peek_dlq(1000)) == 30
    assert await producer.peek_dlq(0) == []
    assert letters(view) == ids


@pytest.mark.servers
async def test_letters_of_any_form_can_be_read(producer: Producer[Any], view: QueueView) -> None:
    bury(view, GARBAGE, reason="decode_failed")
    view.client.xadd(view.keys.dlq, {"d": "", "source_id": "1-1", "reason": "malformed", "detail": "no d"})
    view.client.xadd(view.keys.dlq, {"strange": "fields"})
    found = await producer.peek_dlq()
    assert [(entry.reason, entry.detail, entry.payload) for entry in found] == [
        ("decode_failed", None, GARBAGE),
        ("malformed", "no d", b""),
        ("", None, b""),
    ]


@pytest.mark.servers
async def test_letters_are_chosen_by_id_reason_name_and_age(producer: Producer[Any], view: QueueView) -> None:
    now = view.now_ms()
    old = bury(view, dead(1, "mail"), at_ms=now - 3_600_000)
    older_other = bury(view, dead(2, "print"), reason="unrecoverable", at_ms=now - 3_000_000)
    new = bury(view, dead(3, "mail"), reason="unrecoverable")

    async def chosen(**wanted: Any) -> list[str]:
        return [entry.dlq_id for entry in await producer.peek_dlq(**wanted)]

    assert await chosen(ids=[new, old]) == [new, old]
    assert await chosen(ids=["1-1", old]) == [old]
    assert await chosen(ids=[]) == []
    assert await chosen(reason="unrecoverable") == [older_other, new]
    assert await chosen(name="mail") == [old, new]
    assert await chosen(older_than=1800) == [old, older_other]
    assert await chosen(older_than=10_000) == []
    assert await chosen(name="mail", reason="unrecoverable") == [new]
    assert await chosen(name="mail", older_than=1800) == [old]
    assert await chosen(ids=[old, new], reason="unrecoverable") == [new]
    assert await chosen(newer_than=1800) == [new]
    assert await chosen(newer_than=3300, older_than=1800) == [older_other]
    assert await chosen(newest=True) == [new, older_other, old]
    assert await chosen(newest=True, limit=1) == [new]
    assert await chosen(newest=True, older_than=1800, newer_than=10_000) == [older_other, old]


async def test_a_cluster_of_the_summary_chooses_its_letters(server: Server, view: QueueView) -> None:
    ids = [bury(view, dead(number), error=f"{number} of {'ab'[number % 2]}") for number in range(4)]
    async with Queue(view.keys.queue_name, url=server.url) as queue:
        clusters = {one.fingerprint: one.cluster for one in await queue.dlq_summary()}
        found = await queue.peek_dlq(cluster=clusters["<n> of a"])
        assert [letter["dlq_id"] for letter in found] == ids[::2]
        assert await queue.remove_dlq(cluster=clusters["<n> of b"]) == 2
    assert letters(view) == ids[::2]


@pytest.mark.parametrize("newest", [False, True])
async def test_all_pages_are_replayed_in_the_order_asked_for(
    producer: Producer[Any], view: QueueView, newest: bool
) -> None:
    for number in range(450):
        bury(view, dead(number))
    assert await producer.replay_dlq(430, newest=newest) == 430
    jobs = [decode_job(fields[b"d"]).id for _, fields in view.client.xrange(view.keys.stream)]
    everything = [f"job {number}" for number in range(450)]
    assert jobs == (everything[::-1] if newest else everything)[:430]


@pytest.mark.servers
async def test_a_filter_reads_all_pages(producer: Producer[Any], view: QueueView) -> None:
    for number in range(1000):
        bury(view, dead(number, "rare" if number % 300 == 299 else "common"))
    found = await producer.peek_dlq(name="rare")
    assert [decode_job(entry.payload).id for entry in found] == ["job 299", "job 599", "job 899"]


# --- replaying


@pytest.mark.servers
async def test_a_replay_puts_jobs_back_with_zero_attempts(producer: Producer[Any], view: QueueView) -> None:
    for number in range(5):
        bury(view, dead(number, "mail" if number % 2 else ""))
    assert await producer.replay_dlq(3) == 3
    assert len(letters(view)) == 2
    for number, (job, (_, fields)) in enumerate(zip(view.jobs(), view.entries(), strict=True)):
        original = dead(number, "mail" if number % 2 else "")
        assert job == original.with_attempt(0)
        assert fields[::2] == ([b"d", b"n"] if number % 2 else [b"d"])
    assert await producer.replay_dlq() == 2
    assert await producer.replay_dlq() == 0
    assert await producer.replay_dlq(0) == 0
    assert letters(view) == []
    counts = view.client.hgetall(view.keys.replays)
    assert counts == {f"job {number}".encode(): b"1" for number in range(5)}
    assert 0 < view.all_keys()[":replays"] <= 30 * 24 * 3600


@pytest.mark.servers
async def test_finding_28_undecodable_letters_at_the_head_never_block_the_rest(
    producer: Producer[Any], view: QueueView
) -> None:
    garbage = [bury(view, GARBAGE, reason="decode_failed") for _ in range(450)]
    for number in range(3):
        bury(view, dead(number))
    first = await producer.replay_dlq(1)
    assert (first, first.skipped) == (1, 450)
    rest = await producer.replay_dlq(100)
    assert (rest, rest.skipped, rest.queue_is_full) == (2, 450, False)
    assert [job.id for job in view.jobs()] == ["job 0", "job 1", "job 2"]
    assert letters(view) == garbage  # they stay where they are


@pytest.mark.servers
async def test_replaying_by_id_and_by_filter(producer: Producer[Any], view: QueueView) -> None:
    ids = [bury(view, dead(number, f"name {number % 2}")) for number in range(10)]
    assert await producer.replay_dlq(ids=[ids[7], ids[3], "1-1"]) == 2
    assert view.ids() == ["job 7", "job 3"]
    assert await producer.replay_dlq(2, name="name 0") == 2
    assert view.ids()[2:] == ["job 0", "job 2"]
    assert await producer.replay_dlq(reason="unrecoverable") == 0
    assert await producer.replay_dlq(older_than=100) == 0
    assert len(letters(view)) == 6


@pytest.mark.servers
async def test_concurrent_replays_move_each_letter_once(server: Server | Cluster, view: QueueView) -> None:
    for number in range(500):
        bury(view, dead(number))
    async with open_producer(server.url) as one, open_producer(server.url) as other:
        moved = await asyncio.gather(*(producer.replay_dlq(400) for producer in (one, other, one, other)))
    assert sum(moved) == 500
    assert sorted(view.ids()) == sorted(f"job {number}" for number in range(500))


@pytest.mark.servers
async def test_a_replay_stops_at_a_full_queue_and_reports_it(server: Server | Cluster, view: QueueView) -> None:
    for number in range(10):
        bury(view, dead(number))
    async with open_producer(server.url, max_stream_len=7) as producer:
        await producer.add_bulk(range(3))
        moved = await producer.replay_dlq()
        assert (moved, moved.queue_is_full) == (4, True)
        assert view.length() == 7
        assert len(letters(view)) == 6
        again = await producer.replay_dlq()
        assert (again, again.queue_is_full) == (0, True)
        view.client.delete(view.keys.stream)
        assert await producer.replay_dlq() == 6


@pytest.mark.servers
async def test_large_letters_are_moved_in_calls_of_bounded_size(view: QueueView) -> None:
    for number in range(30):
        bury(view, Job(f"job {number}", "", "x" * 50_000, 1, 1))
    async with Proxy(view.node.address) as proxy, open_producer(proxy.url) as producer:
        assert await producer.replay_dlq() == 30
        assert len(view.jobs()) == 30
        assert max(map(len, proxy.calls)) < 300 * 1024


async def test_a_replay_whose_reply_is_lost_moves_nothing_twice(server: Server, view: QueueView) -> None:
    for number in range(5):
        bury(view, dead(number))
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.peek_dlq(1)
        proxy.hold_replies()
        replay = asyncio.ensure_future(producer.replay_dlq())
        proxy.resume()
        await asyncio.sleep(0)
        assert await replay == 5
        for number in range(5, 10):
            bury(view, dead(number))
        sizes = [len(reply) for reply in (b"*2\r\n:5\r\n:0\r\n",)]
        letters_reply = proxy.link.reply_bytes
        await producer.peek_dlq(200)
        proxy.cut_replies_after(proxy.link.reply_bytes - letters_reply + sizes[0] - 1)
        moved = await producer.replay_dlq()
        assert moved in (0, 5)  # the count may be lost with the reply, but not the jobs
    assert sorted(view.ids()) == sorted(f"job {number}" for number in range(10))
    assert letters(view) == []


@pytest.mark.servers
async def test_the_bytes_of_a_payload_survive_a_replay(producer: Producer[Any], view: QueueView) -> None:
    envelope = b"\x94\xa1x\xc4\x02\xc1\xc1\x01\x05"  # a payload that is not MessagePack
    bury(view, envelope)
    assert await producer.replay_dlq() == 1
    ((_, fields),) = view.entries()
    assert fields == [b"d", b"\x94\xa1x\xc4\x02\xc1\xc1\x01\x00"]


# --- removing


@pytest.mark.servers
async def test_removing_by_id_filter_and_count(producer: Producer[Any], view: QueueView) -> None:
    ids = [bury(view, GARBAGE, reason="decode_failed") for _ in range(5)]
    ids += [bury(view, dead(number, "mail")) for number in range(450)]
    assert await producer.remove_dlq(ids=[ids[0], ids[9], "1-1"]) == 2
    assert await producer.remove_dlq(2, reason="decode_failed") == 2
    assert await producer.remove_dlq(0) == 0
    assert letters(view) == [ids[3], ids[4], *ids[5:9], *ids[10:]]
    assert await producer.remove_dlq(1000, name="mail") == 449
    assert letters(view) == ids[3:5]
    assert await producer.remove_dlq() == 2
    assert view.length() == 0


# --- bad input


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"limit": -1}, "limit"),
        ({"limit": 1.5}, "limit"),
        ({"limit": True}, "limit"),
        ({"ids": ["not an id"]}, "ids"),
        ({"ids": ["5"]}, "ids"),
        ({"ids": ["-"]}, "ids"),
        ({"ids": "1-1"}, "ids"),
        ({"ids": [7]}, "ids"),
        ({"older_than": -1}, "older_than"),
        ({"newer_than": -1}, "newer_than"),
        ({"cluster": 7}, "cluster"),
        ({"older_than": float("nan")}, "older_than"),
    ],
)
async def test_a_bad_filter_is_refused(server: Server, view: QueueView, wanted: dict[str, Any], named: str) -> None:
    kept = bury(view, dead(1))
    async with open_producer(server.url) as producer:
        for method in (producer.peek_dlq, producer.replay_dlq, producer.remove_dlq):
            with pytest.raises(ConfigError, match=f"{named} must be"):
                await method(**wanted)
    assert letters(view) == [kept]
