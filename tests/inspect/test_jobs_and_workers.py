"""Lists of jobs by state and of workers: what an operator asks first when something hangs."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from consume.workers import fleet_in
from support.queues import QueueView
from support.waiting import until
from tampu import ConfigError, Queue
from tampu.inspect.snapshot import is_alive, take_snapshot
from tampu.wire.heartbeat import ALIVE_MS, KEPT_MS, Heartbeat, QueueShare, RunningJob, decode_heartbeat

if TYPE_CHECKING:
    from pathlib import Path

    from servers.cluster import Cluster
    from servers.process import Server


@pytest.fixture
def seen(server: Server | Cluster) -> QueueView:
    return QueueView(server, "q")


@pytest.mark.servers
async def test_jobs_are_listed_by_state_name_and_age(seen: QueueView) -> None:
    release = asyncio.Event()
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def wait() -> None:
            await release.wait()

        @queue.task(attempts=1)
        async def fail() -> None:
            raise ValueError("no")

        dead = await fail.add()
        delayed = await wait.add_in(3600)
        async with working(queue, concurrency=2):
            await until(lambda: seen.dead_letters(), "one is dead")
            running = [(await wait.add()).id for _ in range(2)]
            await until(lambda: len([e for e in seen.events() if e["e"] == "active"]) == 3, "two run")
            waiting = [(await wait.add()).id for _ in range(3)]

            async def ids(state: Any, **filters: Any) -> list[str]:
                return [job.id for job in await queue.jobs(state, **filters)]

            async def runs() -> bool:
                return sorted(await ids("running")) == sorted(running)

            await until(runs, "heartbeats tell what runs")

            async def wait_their_turn() -> bool:
                return sorted(await ids("waiting")) == sorted(waiting)

            # In the order of their entries: one that the worker has read ahead and handed back is the last.
            await until(wait_their_turn, "three wait")
            for state, listed in (("waiting", waiting), ("running", running)):
                assert {(await queue.get_job(one)).state for one in listed} == {state}, "as in the lists"
            assert await ids("waiting", limit=1) == (await ids("waiting"))[:1]
            assert await ids("waiting", name="fail") == []
            assert await ids("waiting", older_than=3600) == []
            assert await ids("delayed") == [delayed.id]
            (letter,) = await queue.jobs("dead", name="fail")
            assert (letter.id, letter.state, letter.dead_letter is not None) == (dead.id, "dead", True)
            (oldest, _) = await queue.jobs("running")
            assert (oldest.state, oldest.name, oldest.worker) == ("running", "wait", (await queue.workers())[0].name)
            assert oldest.age_ms is not None
            assert await ids("running", older_than=3600) == []
            release.set()
            await until(lambda: not seen.length(), "all have run")
    with pytest.raises(ConfigError, match="state must be one of waiting, running, delayed, dead; got 'finished'"):
        await queue.jobs("finished")  # type: ignore[arg-type]


async def test_lists_of_a_queue_that_does_not_exist_are_empty(queue: Queue) -> None:
    assert [await queue.jobs(state) for state in ("waiting", "running", "delayed", "dead")] == [[], [], [], []]
    assert await queue.workers() == []


@pytest.mark.servers("valkey", "redis62", "redis70", "cluster86")
async def test_an_idle_worker_is_listed_also_on_a_paused_queue(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def never() -> None: ...

        async def states() -> list[str]:
            return [worker.state for worker in await queue.workers()]

        async def is_idle() -> bool:
            return await states() == ["idle"]

        async def is_paused() -> bool:
            return await states() == ["paused"]

        async with working(queue):
            await until(is_idle, "it is listed before its first job")
        await queue.pause()
        async with working(queue):
            await until(is_paused, "it is listed although it reads nothing")


async def test_a_blocked_worker_is_alive_and_says_where(seen: QueueView, tmp_path: Path) -> None:
    with fleet_in(tmp_path) as fleet:
        fleet.start(seen.server.url, "blocking")
        async with Queue("q", url=seen.server.url) as queue:
            job = await queue.add("charge", 60)

            async def blocked() -> str:
                return "".join(worker.blocked for worker in await queue.workers() if worker.heartbeat_ms)

            said = await until(blocked, "its heartbeat says so")
            assert re.fullmatch(rf"job charge {job.id} has blocked .* s at process_worker.py:\d+ in blocking", said)
            [worker] = await queue.workers()
            assert (worker.state, [one.id for one in worker.running]) == ("blocked", [job.id])
            # Its event loop published its last heartbeat long ago, and it is still alive.
            published = worker.blocked
            await until(lambda: _later(queue, published), "it goes on to publish heartbeats")


async def _later(queue: Queue, published: str) -> bool:
    return [worker.blocked != published for worker in await queue.workers()] == [True]


@pytest.mark.slow
async def test_a_worker_says_where_it_is_and_what_it_runs(seen: QueueView) -> None:
    release = asyncio.Event()
    async with Queue("q", url=seen.server.url) as queue:

        @queue.task
        async def wait() -> None:
            await release.wait()

        async with working(queue, concurrency=7):
            job = await wait.add()

            async def runs() -> bool:
                return [worker.running_count for worker in await queue.workers()] == [1]

            await until(runs, "a heartbeat has the job")
            (worker,) = await queue.workers()
            assert (worker.pid, worker.concurrency, worker.is_alive) == (os.getpid(), 7, True)
            assert worker.host is not None
            assert worker.name.startswith(f"{worker.host}:{os.getpid()}:")
            assert [(one.id, one.name, one.attempt) for one in worker.running] == [(job.id, "wait", 1)]
            release.set()
        assert await queue.workers() == [], "a worker that ended is not listed"
        assert not list(seen.client.scan_iter(f"{seen.keys.tag}:worker:*"))


async def test_a_killed_worker_is_no_longer_listed_after_5_s(seen: QueueView, tmp_path: Path) -> None:
    with fleet_in(tmp_path) as fleet:
        victim = fleet.start(seen.server.url, "sleeping")
        seen.client.xadd(seen.keys.stream, {"d": "x"})
        async with Queue("q", url=seen.server.url) as queue:

            async def count() -> int:
                return len(await queue.workers())

            async def is_listed() -> bool:
                return [worker.heartbeat_ms is not None for worker in await queue.workers()] == [True]

            await until(is_listed, "it is listed", 30)
            victim.kill()
            [name] = [one["name"] for one in seen.client.xinfo_consumers(seen.keys.stream, "default")]
            key = seen.keys.heartbeat("default", name.decode())
            assert 0 < seen.client.pttl(key) <= KEPT_MS, "its last heartbeat outlives it"
            seen.client.pexpire(key, KEPT_MS - 4_000)
            assert await count() == 1
            seen.client.pexpire(key, KEPT_MS - 6_000)
            assert await count() == 0


def test_a_heartbeat_of_a_later_version_is_understood() -> None:
    share = QueueShare(queues=3, used_by_all=9, used=6, weight=2, reserve=1, limit=0)
    beat = Heartbeat("host", 1, "9.9", 4, 5, 6, 1, [RunningJob("a", "mail", 7, 1)], share)
    packed = beat.encode()
    assert decode_heartbeat(packed) == beat
    longer = b"\x9b" + packed[1:] + b"\xa3new"
    assert decode_heartbeat(longer) == beat


def test_a_heartbeat_of_an_earlier_version_is_understood() -> None:
    beat = Heartbeat("host", 1, "0.1", 4, 5, 6, 1, [RunningJob("a", "mail", 7, 1)])
    assert beat.encode()[0] == 0x98  # eight elements, as before
    assert decode_heartbeat(beat.encode()) == beat
    share = QueueShare(queues=3, used_by_all=9, used=6, weight=2, reserve=1, limit=0)
    nine = b"\x99" + beat._replace(share=share).encode()[1:-1]
    assert decode_heartbeat(nine) == beat._replace(share=share)


async def test_a_fetched_job_has_one_state_everywhere(seen: QueueView) -> None:
    async with Queue("q", url=seen.server.url) as queue:
        jobs = await queue.add_bulk([{"name": "mail", "data": number} for number in range(3)])
        seen.client.xgroup_create(seen.keys.stream, "default", "0")
        seen.client.xreadgroup("default", "w", {seen.keys.stream: ">"}, count=3)

        def publish(held: int, running_count: int, *running: str) -> None:
            listed = [RunningJob(job_id, "mail", 7, 1) for job_id in running]
            beat = Heartbeat("host", 1, "0.2", 1, 5, held, running_count, listed)
            seen.client.set(seen.keys.heartbeat("default", "w"), beat.encode(), px=KEPT_MS)

        async def states() -> list[str]:
            found = [await queue.get_job(job.id) for job in jobs]
            assert {job.worker for job in found} == {"w"}
            for state in ("waiting", "running"):
                listed = {job.id for job in await queue.jobs(state)}
                assert listed == {job.id for job in found if job.state == state}
            return [job.state for job in found]

        assert await states() == ["running"] * 3, "without a heartbeat"
        publish(3, 1, jobs[0].id)
        assert await states() == ["running", "waiting", "waiting"]
        publish(1, 1, jobs[0].id)
        assert await states() == ["running"] * 3, "fetched since, when slots were free"
        publish(300, 101, jobs[0].id)
        assert await states() == ["running"] * 3, "more run than a heartbeat lists"
        publish(3, 1, jobs[0].id)
        seen.client.set(seen.keys.progress(jobs[1].id), "0 0.5 half")
        assert (await queue.get_job(jobs[1].id)).state == "running", "it reports progress"


@pytest.mark.parametrize("packed", [b"", b"\xc0", b"\x91\x01", b"\x98" + b"\xc0" * 8, b"\xff" * 40])
def test_bytes_that_are_not_a_heartbeat_are_ignored(packed: bytes) -> None:
    assert decode_heartbeat(packed) is None


@pytest.mark.parametrize(
    ("heartbeat_ttl_ms", "idle_ms", "alive"),
    [
        (KEPT_MS - 1, 3_600_000, True),
        (KEPT_MS - ALIVE_MS, 0, True),
        (KEPT_MS - ALIVE_MS - 1, 0, False),
        (-2, 29_999, True),
        (-2, 30_000, False),
    ],
)
def test_a_worker_is_counted_for_five_seconds_after_its_heartbeat(
    heartbeat_ttl_ms: int, idle_ms: int, alive: bool
) -> None:
    assert is_alive(heartbeat_ttl_ms, idle_ms) is alive


async def test_a_snapshot_counts_the_workers_by_their_heartbeats(queue: Queue, server: Server) -> None:
    client = server.client()
    client.xgroup_create(queue.keys.stream, "default", mkstream=True)
    for name, left_ms in (("alive", KEPT_MS), ("dead", KEPT_MS - ALIVE_MS - 1000), ("foreign", None)):
        client.xgroup_createconsumer(queue.keys.stream, "default", name)
        if left_ms is not None:
            client.set(queue.keys.heartbeat("default", name), b"x", px=left_ms)
    snapshot = await take_snapshot(queue.producer.ready_client(), queue.keys)
    assert snapshot.workers == 2
    assert [(one.name, one.is_alive) for one in snapshot.groups[0].consumers] == [
        ("alive", True),
        ("dead", False),
        ("foreign", True),
    ]
