"""One queue, one group, two implementations: the real chasquimq 1.3.0 and tampu work side by side.

chasquimq's workers do not renew leases, so handlers here are short: the job of a longer one would be reclaimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from interop.peers import chasquimq_queue, run_program
from support.delayed import delay, member_of
from support.lines import whole_lines
from support.parts import consuming, running
from support.producers import open_producer
from support.queues import QueueView
from support.repeating import fired, next_fire, write_spec
from support.waiting import until
from tampu import (
    AddOptions,
    BackoffSpec,
    InMemorySink,
    Job,
    JobRetryOverride,
    LockOutcome,
    Promoter,
    PromoterConfig,
    QueueEvents,
    RepeatPattern,
    RetryConfig,
    Scheduler,
    SchedulerConfig,
    UnrecoverableError,
)
from tampu.redis.client import Client
from tampu.wire.envelope import decode_job
from tampu.wire.payload import decode_result
from tampu.wire.repeat import StoredSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from interop.peers import Program
    from servers.process import Server

pytestmark = pytest.mark.servers("redis86")

JOBS = 10_000
#: Maximum attempts of a job, for the workers of both.
MAX_ATTEMPTS = 3
QUICK = RetryConfig(initial_backoff_ms=5, max_backoff_ms=50, jitter_ms=5)


def fate_of(number: int) -> dict[str, Any]:
    """Choose a job's data: of 20 jobs, one never succeeds, one gives up at once, four fail once or twice."""
    kind = number % 20
    if kind == 0:
        return {"n": number, "fail": 99}
    if kind == 1:
        return {"n": number, "give_up": True}
    return {"n": number, "fail": {2: 2, 3: 1, 4: 1, 5: 1}.get(kind, 0)}


def runs_of(fate: dict[str, Any]) -> int:
    return 1 if fate.get("give_up") else min(fate.get("fail", 0) + 1, MAX_ATTEMPTS)


def dies(fate: dict[str, Any]) -> str | None:
    """Return the reason of its dead letter; None for a job that completes."""
    if fate.get("give_up"):
        return "unrecoverable"
    return "retries_exhausted" if fate["fail"] >= MAX_ATTEMPTS else None


@contextlib.asynccontextmanager
async def chasquimq_worker(server: Server, log: Path, **options: Any) -> AsyncIterator[Program]:
    settings = {"max_attempts": MAX_ATTEMPTS, **options}
    async with run_program("mixed_fleet_worker.py", server.url, "q", str(log), json.dumps(settings)) as program:
        yield program


def tampu_worker(server: Server, runs: list[tuple[str, int]], **options: Any) -> Any:
    """Start tampu's worker, with the same handler as the other one."""

    async def handler(job: Job[Any]) -> bytes:
        runs.append((job.id, job.attempt))
        if job.payload.get("give_up"):
            raise UnrecoverableError("not worth another try")
        if job.attempt < job.payload.get("fail", 0):
            raise ValueError("failed on purpose")
        return msgspec.msgpack.encode({"by": "tampu", "n": job.payload.get("n")})

    settings: dict[str, Any] = {"queue_name": "q", "max_attempts": MAX_ATTEMPTS, "retry": QUICK}
    return consuming(server.url, handler, **settings | options)


def logged_runs(log: Path) -> list[tuple[str, int]]:
    return [(job_id, int(attempt)) for job_id, attempt in (line.split() for line in whole_lines(log))]


async def is_idle(view: QueueView) -> None:
    def left() -> list[int]:
        # In one transaction: between two reads a job could move and be missed.
        with view.client.pipeline(transaction=True) as both:
            return both.xlen(view.keys.stream).zcard(view.keys.delayed).execute()

    await until(lambda: left() == [0, 0], "all is done", within_secs=60)


async def test_ten_thousand_jobs_of_both_run_on_both_with_exact_attempts(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    ours: list[tuple[str, int]] = []
    log = tmp_path / "runs"
    fates: dict[str, dict[str, Any]] = {}
    async with (
        open_producer(server.url) as producer,
        chasquimq_queue(server.url) as queue,
        chasquimq_worker(server, log, store_results=True),
        tampu_worker(server, ours, store_results=True),
    ):
        for start in range(0, JOBS, 1000):
            its_batch = [fate_of(number) for number in range(start, start + 500)]
            our_batch = [fate_of(number) for number in range(start + 500, start + 1000)]
            added = await queue.call("add_bulk", [{"name": "mail", "data": fate} for fate in its_batch])
            fates |= {job["id"]: fate for job, fate in zip(added, its_batch, strict=True)}
            ids = await producer.add_bulk_with_options(our_batch, AddOptions(name="mail"))
            fates |= dict(zip(ids, our_batch, strict=True))
        await is_idle(view)
        # Each ran exactly its number of attempts, and the attempts were counted across both implementations.
        its = logged_runs(log)
        runs = Counter(job_id for job_id, _ in [*ours, *its])
        assert len(fates) == JOBS
        assert {job_id: runs[job_id] for job_id in fates} == {job_id: runs_of(fate) for job_id, fate in fates.items()}
        assert set(runs) == set(fates)
        attempts = sorted([*ours, *its])
        assert attempts == sorted((job_id, n) for job_id, fate in fates.items() for n in range(runs_of(fate)))
        # Both took part, and retries went from one to the other.
        assert min(len(ours), len(its)) > 100
        assert {job_id for job_id, _ in ours} & {job_id for job_id, _ in its}

        # Each is completed or dead-lettered, once, and both implementations agree.
        doomed = {job_id: reason for job_id, fate in fates.items() if (reason := dies(fate))}
        letters = await producer.peek_dlq(JOBS)
        assert sorted((decode_job(each.payload).id, each.reason) for each in letters) == sorted(doomed.items())
        its_view = await queue.call("peek_dlq", JOBS)
        assert [letter["dlq_id"] for letter in its_view] == [letter.dlq_id for letter in letters]
        assert {letter["reason"] for letter in its_view} == set(doomed.values())
        assert {letter["name"] for letter in its_view} == {"mail"}
        done = [job_id for job_id in fates if job_id not in doomed]
        results = dict(zip(done, await producer.get_result_bulk(done), strict=True))
        decoded = {job_id: decode_result(result) for job_id, result in results.items() if result is not None}
        assert {job_id: result["n"] for job_id, result in decoded.items()} == {id_: fates[id_]["n"] for id_ in done}
        assert {result["by"] for result in decoded.values()} == {"tampu", "chasquimq"}
        assert await queue.call("get_job_result_bulk", done) == [decoded[job_id] for job_id in done]

    # The events of both are consistent.
    completed: Counter[str] = Counter()
    dead: Counter[str] = Counter()
    for _, fields in view.client.xrange(view.keys.events):
        if fields[b"e"] == b"completed":
            completed[fields[b"id"].decode()] += 1
        elif fields[b"e"] == b"dlq":
            dead[fields[b"id"].decode()] += 1
    assert completed == dict.fromkeys(done, 1)
    assert dead == dict.fromkeys(doomed, 1)
    assert view.client.xpending(view.keys.stream, "default")["pending"] == 0
    print(f"tampu ran {len(ours)}, chasquimq {len(its)} of {len(attempts)} runs of {JOBS} jobs")


async def test_overrides_of_either_hold_for_the_workers_of_both(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    ours: list[tuple[str, int]] = []
    log = tmp_path / "runs"
    retry = JobRetryOverride(5, BackoffSpec.fixed(10, jitter_ms=0))
    async with (
        open_producer(server.url) as producer,
        chasquimq_queue(server.url) as queue,
        chasquimq_worker(server, log),
        tampu_worker(server, ours),
    ):
        specs = [{"name": "mail", "data": {"fail": 4}, "attempts": 5, "backoff": 10} for _ in range(100)]
        ids = [job["id"] for job in await queue.call("add_bulk", specs)]
        options = AddOptions(name="mail", retry=retry)
        ids += [await producer.add_with_options({"fail": 4}, options) for _ in range(100)]
        await is_idle(view)
    expected = sorted((job_id, attempt) for job_id in ids for attempt in range(5))
    assert sorted([*ours, *logged_runs(log)]) == expected
    assert view.client.exists(view.keys.dlq) == 0


async def test_its_queue_reads_and_replays_our_dead_letters_and_we_its(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    ours: list[tuple[str, int]] = []
    log = tmp_path / "runs"
    async with open_producer(server.url) as producer, chasquimq_queue(server.url) as queue:
        async with tampu_worker(server, ours):
            by_us = (await queue.call("add", "mail", {"give_up": True}))["id"]
            await until(lambda: view.client.xlen(view.keys.dlq) == 1, "it is dead")
        [letter] = await queue.call("peek_dlq")
        assert (letter["reason"], letter["name"], letter["detail"]) == ("unrecoverable", "mail", None)
        assert decode_job(bytes.fromhex(letter["payload"])).id == by_us
        assert await queue.call("replay_dlq") == 1
        async with chasquimq_worker(server, log):
            await until(lambda: view.client.xlen(view.keys.dlq) == 1, "it is dead again, at its hands")
        assert logged_runs(log) == [(by_us, 0)]
        [ours_now] = await producer.peek_dlq()
        assert (ours_now.reason, ours_now.name, decode_job(ours_now.payload).id) == ("unrecoverable", "mail", by_us)
        assert await producer.replay_dlq() == 1
        assert view.ids() == [by_us]
    assert ours == [(by_us, 0)]


async def test_results_of_either_are_read_by_the_other(server: Server, tmp_path: Path) -> None:
    async with open_producer(server.url) as producer, chasquimq_queue(server.url) as queue:
        async with tampu_worker(server, [], store_results=True):
            job_id = (await queue.call("add", "mail", {"n": 1}))["id"]
            await until(lambda: producer.get_result(job_id), "it is stored")
            assert await queue.call("get_job_result", job_id) == {"by": "tampu", "n": 1}
        async with chasquimq_worker(server, tmp_path / "runs", store_results=True):
            job_id = await producer.add_with_options({"n": 2}, AddOptions(name="mail"))
            result = await until(lambda: producer.get_result(job_id), "it is stored")
            assert decode_result(result) == {"by": "chasquimq", "n": 2}


async def test_the_promoters_of_both_share_one_lock_and_promote_each_job_once(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    ours: list[tuple[str, int]] = []
    log = tmp_path / "runs"
    metrics = InMemorySink()

    def holder() -> str:
        return (view.client.get(view.keys.promoter_lock) or b"").decode()

    async with contextlib.AsyncExitStack() as its:
        await its.enter_async_context(chasquimq_worker(server, log, run_scheduler=False))
        await until(lambda: holder().startswith("c-"), "it leads")
        async with tampu_worker(server, ours, consumer_id="ours", metrics=metrics, run_scheduler=False):
            await until(lambda: metrics.lock_outcomes == [LockOutcome.HELD], "we stand by")
            first = [str(number) for number in range(1000)]
            view.client.zadd(view.keys.delayed, {member_of(job_id, "mail", {}): 1 for job_id in first})
            await is_idle(view)
            assert metrics.promoter_ticks == []
            await its.aclose()
            await until(lambda: metrics.lock_outcomes == [LockOutcome.HELD, LockOutcome.ACQUIRED], "we lead at once", 3)
            await its.enter_async_context(chasquimq_worker(server, log, run_scheduler=False))
            second = [str(number) for number in range(1000, 2000)]
            view.client.zadd(view.keys.delayed, {member_of(job_id, "mail", {}): 1 for job_id in second})
            await is_idle(view)
            assert holder().startswith("ours")
        await until(lambda: holder().startswith("c-"), "it leads at once", 3)
        delay(view, member_of("last", "mail", {}))
        await is_idle(view)
    assert sorted(job_id for job_id, _ in [*ours, *logged_runs(log)]) == sorted([*first, *second, "last"])


async def test_jobs_its_promoter_moved_while_ours_slept_are_not_moved_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = QueueView(server, "q")
    log = tmp_path / "runs"
    late: list[Any] = []
    sleeps = asyncio.Event()
    send = Client.run

    async def sleep_before_moving(pipe: Client, script: Any, *arguments: Any, **options: Any) -> Any:
        if script.name != "promote":
            return await send(pipe, script, *arguments, **options)
        sleeps.set()
        view.client.delete(view.keys.promoter_lock)  # run out meanwhile
        await until(lambda: not view.delayed(), "its promoter has moved them")
        late.append(await send(pipe, script, *arguments, **options))
        return late[-1]

    monkeypatch.setattr(Client, "run", sleep_before_moving)
    ids = [str(number) for number in range(200)]
    view.client.zadd(view.keys.delayed, {member_of(job_id, "mail", {}): 1 for job_id in ids})
    async with running(Promoter(server.url, PromoterConfig(queue_name="q", holder_id="ours"))):
        await until(sleeps.is_set, "we lead, and fall asleep before we move them")
        async with chasquimq_worker(server, log, run_scheduler=False):
            await until(lambda: late, "ours has woken up")
            await is_idle(view)
    _, _, _, promoted, *_ = late[0]
    assert promoted == 0
    assert sorted(job_id for job_id, _ in logged_runs(log)) == sorted(ids)


async def test_the_schedulers_of_both_share_one_lock_and_fire_once_per_time(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    log = tmp_path / "runs"
    pattern = RepeatPattern.every(60)
    spec = StoredSpec(key="k", job_name="mail", pattern=pattern, payload_slot=b"\xc4\x01\x80", limit=30)

    def holder() -> str:
        return (view.client.get(view.keys.scheduler_lock) or b"").decode()

    ours = Scheduler(server.url, SchedulerConfig(queue_name="q", holder_id="ours", tick_interval_ms=50))
    write_spec(view, spec, view.now_ms() + 60)
    async with contextlib.AsyncExitStack() as its:
        await its.enter_async_context(chasquimq_worker(server, log))
        await until(lambda: holder().startswith("s-"), "it leads")
        async with running(ours):
            await until(lambda: fired(view, "k") >= 10, "its scheduler fires")
            assert holder().startswith("s-")
            await its.aclose()
            await until(lambda: holder().startswith("ours"), "ours takes over at once", 3)
            before = fired(view, "k")
            await until(lambda: fired(view, "k") >= min(before + 5, 30) or next_fire(view, "k") is None, "and fires on")
        await its.enter_async_context(chasquimq_worker(server, log))
        await until(lambda: not view.client.exists(view.keys.repeat_spec("k")), "its scheduler fires the rest")
        await is_idle(view)
    assert len(logged_runs(log)) == 30
    assert len({job_id for job_id, _ in logged_runs(log)}) == 30


async def test_our_events_are_read_by_its_queue_events_and_its_by_ours(server: Server, tmp_path: Path) -> None:
    view = QueueView(server, "q")
    retry = JobRetryOverride(2, BackoffSpec.fixed(10, jitter_ms=0))
    async with open_producer(server.url) as producer:

        async def run_three() -> list[str]:
            ids = [
                await producer.add_with_options({"n": 1}, AddOptions(name="fine")),
                await producer.add_with_options({"fail": 1}, AddOptions(name="flaky", retry=retry)),
                await producer.add_with_options({"give_up": True}, AddOptions(name="hopeless")),
            ]
            await is_idle(view)
            return ids

        async with tampu_worker(server, []):
            our_ids = await run_three()
        async with chasquimq_worker(server, tmp_path / "runs"):
            its_ids = await run_three()

    async with run_program("mixed_fleet_events.py", server.url, "q") as reader:
        seen_by_it = await reader.lines(view.client.xlen(view.keys.events))
    seen_by_us = []
    async with QueueEvents("q", url=server.url, last_event_id="0", block_ms=50) as events:
        async for event in events:
            seen_by_us.append([event.name, event.job_id, event.job_name, dict(event.fields)])
            if len(seen_by_us) == len(seen_by_it):
                break
    # Both read the same events; fields that only tampu writes are text to chasquimq.
    assert [event[:3] for event in seen_by_it] == [event[:3] for event in seen_by_us]
    numbers = ("attempt", "backoff_ms", "duration_us", "ts")
    for its, ours in zip(seen_by_it, seen_by_us, strict=True):
        assert {name: its[3].get(name) for name in numbers} == {name: ours[3].get(name) for name in numbers}
        assert its[3].get("reason") == ours[3].get("reason")

    def story(job_id: str) -> list[Any]:
        return [(event[0], event[3].get("attempt")) for event in seen_by_us if event[1] == job_id]

    for fine, flaky, hopeless in (our_ids, its_ids):
        assert story(fine) == [("active", 1), ("completed", 1)]
        # `waiting` and the `active` behind it come from two processes' parts: their order is not given there.
        assert sorted(story(flaky), key=str) == sorted(
            [
                ("active", 1),
                ("failed", 1),
                ("retry-scheduled", 2),
                ("waiting", None),
                ("active", 2),
                ("completed", 2),
            ],
            key=str,
        )
        assert story(hopeless) == [("active", 1), ("failed", 1), ("dlq", 1)]
    names = {(event[1], event[2]) for event in seen_by_us if event[1] in our_ids}
    assert names == set(zip(our_ids, ("fine", "flaky", "hopeless"), strict=True))
