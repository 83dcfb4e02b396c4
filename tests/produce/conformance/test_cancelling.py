"""Cancelling delayed jobs: with explicit and generated ids, without an index, and while they wait for a retry."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.producers import open_producer
from support.proxy import Proxy
from tampu.errors import ConfigError, RedisError
from tampu.inspect.jobs import JobSearch
from tampu.produce.options import AddOptions
from tampu.redis.faults import ConnectionLost
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import encode_job
from tampu.wire.job import Job

if TYPE_CHECKING:
    from servers.process import Server
    from support.queues import QueueView
    from tampu.produce.producer import Producer


def add_as_a_peer(
    view: QueueView, job_id: str, *, name: str = "", payload: Any = None, attempt: int = 0, due_ms: int | None = None
) -> bytes:
    """Add a delayed job without an index, as other implementations do."""
    member = encode_delayed_member(name, encode_job(Job(job_id, name, payload, attempt, 1)))
    view.client.zadd(view.keys.delayed, {member: view.now_ms() + 60_000 if due_ms is None else due_ms})
    return member


@pytest.mark.servers
async def test_an_explicit_id_is_cancelled_with_its_marker_and_index(producer: Producer[Any], view: QueueView) -> None:
    await producer.add_in_with_id("x", 60, 1)
    assert await producer.cancel_delayed("x") is True
    assert view.delayed() == []
    assert not {":dlid:x", ":didx:x"} & set(view.all_keys())
    assert await producer.cancel_delayed("x") is False
    assert (await producer.add_in_with_id("x", 60, 2)).is_new  # the id is free again


@pytest.mark.servers
async def test_finding_26_a_job_with_a_generated_id_is_cancelled(producer: Producer[Any], view: QueueView) -> None:
    ids = await producer.add_in_bulk(60, range(3))
    single = await producer.add_in_with_options(60, 4, AddOptions(name="n"))
    assert await producer.cancel_delayed(ids[1])
    assert await producer.cancel_delayed(single)
    assert sorted(view.delayed_ids()) == sorted([ids[0], ids[2]])
    assert view.client.hkeys(view.keys.due) == [ids[0][-10:].encode(), ids[2][-10:].encode()]


@pytest.mark.servers
async def test_a_generated_id_is_found_without_a_search(
    producer: Producer[Any], view: QueueView, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def search(*_: object) -> None:
        raise AssertionError("it searches the whole delayed set")

    monkeypatch.setattr(JobSearch, "find_delayed_member", search)
    job_id = await producer.add_in(60, 1)
    assert (await producer.admin.job(job_id)).state == "delayed"
    assert await producer.cancel_delayed(job_id) is True


@pytest.mark.servers
async def test_one_of_many_jobs_with_the_same_due_time_is_cancelled(producer: Producer[Any], view: QueueView) -> None:
    due = time.time() + 600
    ids = [await producer.add_at(due, number) for number in range(20)]
    for number in range(1500):  # more than the script searches
        add_as_a_peer(view, f"other {number}", payload=ids[7], due_ms=round(due * 1000))
    assert await producer.cancel_delayed(ids[7]) is True
    assert await producer.cancel_delayed(ids[7]) is False
    assert ids[7] not in view.delayed_ids()
    assert len(view.delayed()) == 1519


@pytest.mark.servers
async def test_a_job_of_a_peer_without_an_index_is_found_and_cancelled(
    producer: Producer[Any], view: QueueView
) -> None:
    for number in range(1200):  # more than one page of the search
        add_as_a_peer(view, f"other {number}", payload="mine")  # the id looked for is in other jobs' payloads
    add_as_a_peer(view, "mine", name="mail")
    assert await producer.cancel_delayed("mine") is True
    assert "mine" not in view.delayed_ids()
    assert len(view.delayed()) == 1200
    assert await producer.cancel_delayed("mine") is False
    assert len(view.delayed()) == 1200


@pytest.mark.servers
async def test_a_job_that_waits_for_its_retry_is_cancelled(producer: Producer[Any], view: QueueView) -> None:
    job_id = await producer.add_in(60, 1)
    # It failed in another implementation's worker and waits for its retry: its due time is still the old one.
    view.client.delete(view.keys.delayed)
    add_as_a_peer(view, job_id, attempt=1)
    assert await producer.cancel_delayed(job_id) is True
    assert view.delayed() == []
    assert ":due" not in view.all_keys()


@pytest.mark.servers
async def test_a_promoted_job_is_not_cancelled(producer: Producer[Any], view: QueueView) -> None:
    await producer.add_in_with_id("x", 60, 1)
    view.client.delete(view.keys.delayed)  # promoted
    assert await producer.cancel_delayed("x") is False
    assert ":dlid:x" in view.all_keys()  # its id is still taken
    assert await producer.cancel_delayed("never there") is False


@pytest.mark.servers
async def test_a_bulk_of_cancels_returns_one_bool_each(producer: Producer[Any], view: QueueView) -> None:
    ids = await producer.add_in_bulk_with_ids(60, [(f"id {number}", number) for number in range(300)])
    asked = [*ids[:100], "no such id", *ids[200:], ids[0]]
    answers = await producer.cancel_delayed_bulk(asked)
    assert answers[:-1] == [True] * 100 + [False] + [True] * 100
    assert len(view.delayed()) == 100
    assert await producer.cancel_delayed_bulk([]) == []


@pytest.mark.servers
async def test_one_of_several_concurrent_cancels_wins(producer: Producer[Any], view: QueueView) -> None:
    await producer.add_in_with_id("x", 60, 1)
    minted = await producer.add_in(60, 2)
    add_as_a_peer(view, "peer's")
    for job_id in ("x", minted, "peer's"):
        answers = await asyncio.gather(*(producer.cancel_delayed(job_id) for _ in range(10)))
        assert sorted(answers) == [False] * 9 + [True]


@pytest.mark.servers
async def test_unreadable_members_do_not_stop_the_search(producer: Producer[Any], view: QueueView) -> None:
    for member in (b"", b"\x00", b"\xff\xff\xff\xffmine", b"\x00\x00\x00\x00mine", b"\x00\x00\x00\x00\x94\xa4mine"):
        view.client.zadd(view.keys.delayed, {member: 1})
    assert await producer.cancel_delayed("mine") is False
    add_as_a_peer(view, "mine")
    assert await producer.cancel_delayed("mine") is True
    assert len(view.delayed()) == 5


@pytest.mark.parametrize("job_id", ["", "  ", "a\x00b", 7, None])
async def test_a_bad_id_is_refused(server: Server, job_id: Any) -> None:
    async with open_producer(server.url) as producer:
        with pytest.raises(ConfigError, match="id must be"):
            await producer.cancel_delayed(job_id)
        with pytest.raises(ConfigError, match="id must be"):
            await producer.cancel_delayed_bulk(["fine", job_id])


async def test_a_cancel_whose_reply_is_lost_raises(server: Server, view: QueueView) -> None:
    async with Proxy(server.address) as proxy, open_producer(proxy.url) as producer:
        await producer.add_in_with_id("x", 60, 1)
        proxy.cut_replies_after(0)
        # A second call would return False although this one cancelled the job.
        with pytest.raises(ConnectionLost):
            await producer.cancel_delayed("x")
        assert view.delayed() == []
        assert await producer.cancel_delayed("x") is False


async def test_a_delayed_key_of_another_type_is_an_error(server: Server, view: QueueView) -> None:
    async with open_producer(server.url) as producer:
        view.client.set(view.keys.delayed, "x")
        with pytest.raises(RedisError, match="WRONGTYPE"):
            await producer.cancel_delayed("x")
        view.client.delete(view.keys.delayed)
