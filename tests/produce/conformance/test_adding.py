"""Immediate jobs: what single and bulk adds write and return."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from support.producers import ids_in, open_producer
from support.proxy import Proxy
from tampu.base.clock import wall_clock_ms
from tampu.produce.options import AddOptions
from tampu.wire.envelope import encode_job
from tampu.wire.job import Job, JobId
from tampu.wire.retry import BackoffSpec, JobRetryOverride
from tampu.wire.ulid import encode_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from servers.process import Server
    from support.queues import QueueView
    from tampu.produce.producer import Producer

RETRY = JobRetryOverride(max_attempts=7, backoff=BackoffSpec.fixed(500))
PAYLOAD = {"to": "ada@example.com", "tries": [1, 2.5, None, True, b"\x00\xff"], "name": "Añá"}


def packed(job_id: str, payload: Any, created_at_ms: int, *rest: Any) -> bytes:
    """Return an envelope as msgpack-python writes it, independent of tampu's codec."""
    inner = msgpack.packb(payload, use_bin_type=True)
    return msgpack.packb([job_id, inner, created_at_ms, 0, *rest], use_bin_type=True)


@pytest.mark.servers
async def test_an_add_is_one_entry_with_just_the_envelope(producer: Producer[Any], view: QueueView) -> None:
    before = wall_clock_ms()
    job_id = await producer.add(PAYLOAD)
    after = wall_clock_ms()
    ((_, fields),) = view.entries()
    (job,) = view.jobs()
    assert before <= job.created_at_ms <= after
    assert fields == [b"d", packed(job_id, PAYLOAD, job.created_at_ms)]
    assert (job.attempt, job.retry, job.name) == (0, None, "")
    assert job_id[:10] == encode_time(job.created_at_ms)


@pytest.mark.servers
async def test_a_generated_id_is_new_and_a_ulid(producer: Producer[Any]) -> None:
    ids = [await producer.add(number) for number in range(5)]
    assert all(isinstance(job_id, JobId) and job_id.is_new for job_id in ids)
    assert all(len(job_id) == 26 for job_id in ids)
    assert len(set(ids)) == 5


@pytest.mark.servers
async def test_options_name_id_and_retry_are_on_the_wire(producer: Producer[Any], view: QueueView) -> None:
    options = AddOptions().with_name("mail").with_id("order-7").with_retry(RETRY)
    job_id = await producer.add_with_options(PAYLOAD, options)
    assert job_id == "order-7"
    assert job_id.is_new
    ((_, fields),) = view.entries()
    (job,) = view.jobs()
    retry = [7, ["fixed", 500, None, None, None]]
    assert fields == [b"d", packed("order-7", PAYLOAD, job.created_at_ms, retry), b"n", b"mail"]
    assert job.retry == RETRY


@pytest.mark.servers
async def test_ids_of_every_length(producer: Producer[Any], view: QueueView) -> None:
    ids = ["x" * size for size in (1, 31, 32, 255, 256, 1000, 65535, 65536)]
    for job_id in ids:
        assert await producer.add_with_id(job_id, 1) == job_id
        assert not (await producer.add_with_id(job_id, 1)).is_new
    assert view.ids() == ids


@pytest.mark.servers
async def test_an_id_of_any_characters(producer: Producer[Any], view: QueueView) -> None:
    ids = ["ä ö/ü:{x}", "\r\n$3\r\nfoo", "*", "日本"]
    for job_id in ids:
        await producer.add_with_id(job_id, 1)
        assert view.client.exists(view.keys.dedup_marker(job_id)) == 1
    assert view.ids() == ids


@pytest.mark.servers
async def test_payloads_of_every_size(producer: Producer[Any], view: QueueView) -> None:
    ids: list[str] = []
    texts: list[str] = []
    for size in (0, 1, 250, 255, 256, 257, 65_535, 65_536, 300_000, 1_000_000):
        text = "x" * size
        ids += [await producer.add(text), *(await producer.add_bulk([text] * 2))]
        texts += [text] * 3
    assert view.ids() == ids
    assert view.payloads() == texts
    assert [encode_job(job) for job in view.jobs()] == [fields[1] for _, fields in view.entries()]


@pytest.mark.servers
async def test_jobs_added_in_one_turn_of_the_loop_arrive_in_order(producer: Producer[Any], view: QueueView) -> None:
    ids = await asyncio.gather(*(producer.add(number) for number in range(1000)))
    assert view.ids() == ids
    assert view.payloads() == list(range(1000))


@pytest.mark.servers
async def test_jobs_of_all_kinds_in_one_turn(producer: Producer[Any], view: QueueView) -> None:
    names = [AddOptions(name=f"name {number % 3}") for number in range(30)]
    adds = []
    for number, named in enumerate(names):
        adds += [
            producer.add(number),
            producer.add_with_options(number, named),
            producer.add_with_options(number, named.with_id(f"now {number}").with_retry(RETRY)),
            producer.add_in(1000, number),
            producer.add_in_with_options(1000 + number, number, named.with_id(f"later {number}")),
        ]
    ids = await asyncio.gather(*adds)
    assert all(job_id.is_new for job_id in ids)
    now = [job_id for rank, job_id in enumerate(ids) if rank % 5 < 3]
    later = [job_id for rank, job_id in enumerate(ids) if rank % 5 >= 3]
    assert view.ids() == now
    assert sorted(view.delayed_ids()) == sorted(later)
    for rank, job in enumerate(view.jobs()):
        number = rank // 3
        assert job.payload == number
        assert job.name == ("" if rank % 3 == 0 else f"name {number % 3}")
        assert job.retry == (RETRY if rank % 3 == 2 else None)


# --- bulk


def generator(count: int) -> Iterator[int]:
    yield from range(count)


async def async_generator(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


class Reiterable:
    """Neither a sequence nor an iterator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.servers
@pytest.mark.parametrize("form", [list, tuple, range, generator, async_generator, Reiterable])
async def test_a_bulk_of_any_form_and_length(producer: Producer[Any], view: QueueView, form: Any) -> None:
    for count in (0, 1, 255, 256, 257, 1025):
        payloads = form(range(count)) if form in (list, tuple) else form(count)
        ids = await producer.add_bulk(payloads)
        assert view.ids() == ids
        assert view.payloads() == list(range(count))
        assert all(job_id.is_new for job_id in ids)
        view.client.delete(view.keys.stream)


@pytest.mark.servers
async def test_a_bulk_writes_the_same_bytes_as_single_adds(producer: Producer[Any], view: QueueView) -> None:
    ids = await producer.add_bulk([PAYLOAD] * 3)
    for job_id, (_, fields), job in zip(ids, view.entries(), view.jobs(), strict=True):
        assert fields == [b"d", packed(job_id, PAYLOAD, job.created_at_ms)]


@pytest.mark.servers
async def test_a_bulk_with_options_has_them_on_every_job(producer: Producer[Any], view: QueueView) -> None:
    await producer.add_bulk_with_options(range(300), AddOptions(name="mail", retry=RETRY))
    await producer.add_bulk_with_options(iter(range(300, 600)), AddOptions(name="mail", retry=RETRY))
    jobs = view.jobs()
    assert [job.payload for job in jobs] == list(range(600))
    assert {job.name for job in jobs} == {"mail"}
    assert {job.retry for job in jobs} == {RETRY}


@pytest.mark.servers
async def test_a_bulk_of_one_may_have_an_id(producer: Producer[Any], view: QueueView) -> None:
    (first,) = await producer.add_bulk_with_options(["x"], AddOptions(id="only", name="n"))
    (second,) = await producer.add_bulk_with_options(iter(["y"]), AddOptions(id="only"))
    assert (first, first.is_new, second, second.is_new) == ("only", True, "only", False)
    assert view.payloads() == ["x"]
    assert await producer.add_bulk_with_options([], AddOptions(id="none")) == []


@pytest.mark.servers
async def test_a_named_bulk_gives_each_job_its_name(producer: Producer[Any], view: QueueView) -> None:
    items = [(f"name {number % 4}" if number % 5 else "", number) for number in range(600)]
    ids = await producer.add_bulk_named(items)
    assert view.ids() == ids
    assert [(job.name, job.payload) for job in view.jobs()] == items
    nameless = [fields for _, fields in view.entries() if len(fields) == 2]
    assert len(nameless) == 120  # no field n when the name is empty


@pytest.mark.servers
async def test_large_jobs_are_sent_in_windows_of_bounded_size(view: QueueView) -> None:
    texts = ["x" * size for size in (10, 100_000, 100_000, 100_000, 10, 400_000, 10, *[1000] * 400)]
    async with Proxy(view.node.address) as proxy, open_producer(proxy.url) as producer:
        ids = await producer.add_bulk(texts)
        assert view.ids() == ids
        await asyncio.gather(*(producer.add(text) for text in texts))
        assert view.payloads() == texts + texts
        windows = [(len(ids_in(call)), len(call)) for call in proxy.calls]
        in_transactions = proxy.link.commands.count(b"XADD")
    assert in_transactions == 4, "the largest, added one by one"
    assert sum(jobs for jobs, _ in windows) == 2 * len(texts) - in_transactions
    for jobs, size in windows:
        assert jobs <= 256
        assert jobs == 1 or size <= 256 * 1024 + 1000


# --- properties


@pytest.mark.servers
async def test_a_producer_has_an_id_and_its_keys(producer: Producer[Any]) -> None:
    assert len(producer.producer_id) == 36
    assert producer.stream_key == "{chasqui:q}:stream"
    assert producer.delayed_key == "{chasqui:q}:delayed"
    assert producer.dlq_key == "{chasqui:q}:dlq"
    assert producer.config.queue_name == "q"


async def test_jobs_keep_their_bytes(server: Server) -> None:
    job: Job[Any] = Job("x", "n", {"a": 1}, 0, 5)
    assert encode_job(job) == packed("x", {"a": 1}, 5)
