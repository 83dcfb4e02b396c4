"""Finding a job in every state, including jobs of other implementations and ids of any form."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import ConfigError, Job, Queue, UnrecoverableError
from tampu.inspect import jobs
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import encode_job
from tampu.wire.payload import encode_value
from tampu.wire.ulid import encode_ulid

if TYPE_CHECKING:
    from servers.process import Server

#: One id of every form.
IDS = [None, "order-7", "é" * 40, "0" * 26, "not a ulid but 26 long....", "7" + "Z" * 25]


async def test_a_waiting_job(queue: Queue) -> None:
    for job_id in IDS:
        job = await queue.add("mail", 1, job_id=job_id)
        state = await queue.get_job(job.id)
        assert (state.id, state.state, state.name, state.attempt) == (job.id, "waiting", "mail", 0)
        assert state.created_at_ms is not None
        assert state.entry_id is not None
        assert state.entry_id.endswith("-0") or "-" in state.entry_id


async def test_a_delayed_job(queue: Queue, server: Server) -> None:
    for job_id in IDS:
        job = await queue.add("mail", 1, delay_ms=60_000, job_id=job_id)
        state = await queue.get_job(job.id)
        assert (state.state, state.name, state.attempt) == ("delayed", "mail", 0)
        assert state.run_at_ms is not None
        assert abs(state.run_at_ms - state.created_at_ms - 60_000) < 10_000  # type: ignore[operator]
    await queue.cancel_delayed(job.id)
    assert (await queue.get_job(job.id)).state == "unknown"


async def test_a_delayed_job_of_a_peer_is_found_without_an_index(queue: Queue, server: Server) -> None:
    client = server.client()
    for number in range(600):
        member = encode_delayed_member("mail", encode_job(Job(f"theirs-{number}", "mail", number, 1, 5)))
        client.zadd(queue.keys.delayed, {member: 2_000_000_000_000 + number})
    state = await queue.get_job("theirs-599")
    assert (state.state, state.name, state.attempt, state.created_at_ms) == ("delayed", "mail", 1, 5)
    assert state.run_at_ms == 2_000_000_000_599


async def test_a_running_job_and_its_worker(queue: Queue, server: Server) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @queue.task
    async def work() -> str:
        started.set()
        await go_on.wait()
        return "done"

    async with working(queue, consumer_id="worker-1", group="workers"):
        job = await work.add()
        await started.wait()
        state = await queue.get_job(job.id)
        assert (state.state, state.group, state.name) == ("running", "workers", "work")
        assert (state.worker or "").startswith("worker-1:")
        assert state.idle_ms is not None
        go_on.set()
        await job.result(20)
        state = await queue.get_job(job.id)
        assert (state.state, state.result) == ("done", "done")


async def test_a_finished_job_with_a_result(queue: Queue, server: Server) -> None:
    results = {"none": b"\xc0", "value": b"\x2a", "no messagepack": b"\xc1"}
    for job_id, packed in results.items():
        server.client().set(queue.keys.result(job_id), packed)
    assert [((await queue.get_job(job_id)).state, (await queue.get_job(job_id)).result) for job_id in results] == [
        ("done", None),
        ("done", 42),
        ("done", b"\xc1"),
    ]


async def test_a_finished_job_without_a_result_is_unknown(queue: Queue, server: Server) -> None:
    async def handler(job: Job[Any]) -> None: ...

    async with working("q", handler, url=server.url):
        job = await queue.add("", 1)
        await until(lambda: server.client().xlen(queue.keys.stream) == 0, "it is done")
    assert (await queue.get_job(job.id)).state == "unknown"
    assert (await queue.get_job("never there")).state == "unknown"


async def test_a_job_that_waits_for_its_retry(queue: Queue) -> None:
    @queue.task(backoff=timedelta(seconds=60))
    async def flaky() -> None:
        raise ValueError

    async with working(queue, max_attempts=9, retry=None):
        job = await flaky.add()
        state = await until(lambda: _in_state(queue, job.id, "delayed"), "it waits for its retry")
        assert (state.attempt, state.name) == (1, "flaky")


async def _in_state(queue: Queue, job_id: str, wanted: str) -> Any:
    state = await queue.get_job(job_id)
    return state if state.state == wanted else None


@pytest.mark.parametrize("job_id", IDS)
async def test_a_dead_letter_and_its_reason(queue: Queue, server: Server, job_id: str | None) -> None:
    async def handler(job: Job[Any]) -> None:
        raise UnrecoverableError("no way")

    async with working("q", handler, url=server.url):
        job = await queue.add("mail", 1, job_id=job_id)
        state = await until(lambda: _in_state(queue, job.id, "dead"), "it is dead")
    assert (state.name, state.attempt) == ("mail", 1)
    assert (state.dead_letter.reason, state.dead_letter.error) == ("unrecoverable", "no way")
    await queue.replay_dlq()
    assert (await queue.get_job(job.id)).state == "waiting"


async def test_an_unreadable_dead_letter_hides_no_other(queue: Queue, server: Server) -> None:
    client = server.client()
    client.xadd(queue.keys.dlq, {"d": b"\xc1 garbage about order-7", "reason": "decode_failed"})
    client.xadd(queue.keys.dlq, {"d": encode_job(Job("order-7", "", 1)), "reason": "unrecoverable"})
    client.xadd(queue.keys.dlq, {"reason": "malformed"})
    state = await queue.get_job("order-7")
    assert state.dead_letter is not None
    assert state.dead_letter.reason == "unrecoverable"


async def test_a_payload_that_contains_another_jobs_id_is_not_that_job(queue: Queue) -> None:
    await queue.add("", {"about": "order-7"})
    assert (await queue.get_job("order-7")).state == "unknown"


# --- among many other jobs


def crowd(server: Server, key: str, count: int, **fields: bytes) -> None:
    pipe = server.client().pipeline(transaction=False)
    for number in range(count):
        pipe.xadd(key, {"d": encode_job(Job(f"other-{number}", "", number)), **fields})  # type: ignore[dict-item]
    pipe.execute()


async def test_a_job_is_found_behind_many_others(queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PAGE", 10)
    monkeypatch.setattr(jobs, "MAX_PAGES", 3)
    crowd(server, queue.keys.stream, 95)
    minted, explicit = await queue.add("", 1), await queue.add("", 1, job_id="order-7")
    assert (await queue.get_job(minted.id)).state == "waiting"
    assert (await queue.get_job(explicit.id)).state == "waiting"  # at the end
    assert (await queue.get_job("other-0")).state == "waiting"  # at the beginning
    assert (await queue.get_job("other-50")).state == "unknown"  # beyond the pages that a search reads


async def test_a_promoted_job_is_found_although_its_id_is_old(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PAGE", 10)
    monkeypatch.setattr(jobs, "MAX_PAGES", 3)
    old = encode_ulid(1_600_000_000_000, bytes(16))
    crowd(server, queue.keys.stream, 95)
    server.client().xadd(queue.keys.stream, {"d": encode_job(Job(old, "", 1))})
    assert (await queue.get_job(old)).state == "waiting"


async def test_a_dead_letter_is_found_behind_many_others(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PAGE", 10)
    monkeypatch.setattr(jobs, "MAX_PAGES", 3)
    minted = encode_ulid(1_600_000_000_000, bytes(16))
    for job_id in (minted, "order-7"):
        letter = {"d": encode_job(Job(job_id, "", 1)), "n": "pay", "reason": "unrecoverable"}
        server.client().xadd(queue.keys.dlq, letter)  # type: ignore[arg-type]
    crowd(server, queue.keys.dlq, 95, reason=b"unrecoverable")
    for job_id in (minted, "order-7"):
        found = await queue.get_job(job_id)
        assert (found.state, found.name) == ("dead", "pay")


async def test_dead_letters_older_than_the_job_are_not_read(queue: Queue, server: Server) -> None:
    client = server.client()
    pipe = client.pipeline(transaction=False)
    for number in range(1, 3001):
        pipe.xadd(queue.keys.dlq, {"d": b"old", "reason": "malformed"}, id=f"1000-{number}")
    pipe.execute()
    client.config_resetstat()
    found: Any = await queue.get_job(encode_ulid(1_700_000_000_000, bytes(16)))
    assert found.state == "unknown"
    assert client.info("commandstats")["cmdstat_xrevrange"]["calls"] <= 2


@pytest.mark.parametrize("bad", ["", " ", None, 5, "\x00"])
async def test_a_bad_id_is_refused(queue: Queue, bad: Any) -> None:
    with pytest.raises(ConfigError, match="id must be"):
        await queue.get_job(bad)


@pytest.mark.servers("redis86", "cluster86")
async def test_states_are_found_on_other_servers_too(server: Server) -> None:
    async with Queue("q", url=server.url) as queue:
        waiting, delayed = await queue.add("n", {}), await queue.add("n", {}, delay_ms=60_000)
        assert [(await queue.get_job(job.id)).state for job in (waiting, delayed)] == ["waiting", "delayed"]

        @queue.task
        async def n() -> str:
            return "done"

        async with working(queue):
            assert await waiting.result(20) == "done"
        assert (await queue.get_job(waiting.id)).state == "done"


async def test_a_job_that_finishes_during_the_search_is_done(
    queue: Queue, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await queue.add("mail", 1)
    client = server.client()
    search = jobs.JobSearch._find_in_stream

    async def finish_first(*where: Any) -> Any:
        client.set(queue.keys.result(job.id), encode_value("sent"))
        client.delete(queue.keys.stream)
        return await search(*where)

    monkeypatch.setattr(jobs.JobSearch, "_find_in_stream", finish_first)
    state = await queue.get_job(job.id)
    assert (state.state, state.result) == ("done", "sent")
