"""Many queues of one worker on a Cluster: shared connections, watched streams, slots that move under load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from consume.views import WorkerView
from support.users import acl_user
from support.waiting import until
from tampu import Queue, Worker
from tampu.consume import link, reader
from tampu.maintain import wake_ups
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles
    from tampu import Job


class Runs(Counter[str]):
    """Counts how often each job has run. A job whose payload is "hold" runs until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()

    async def __call__(self, job: Job[Any]) -> None:
        self[job.id] += 1
        if job.payload == "hold":
            await self.release.wait()


def connections(cluster: Cluster) -> dict[tuple[int, str], dict[str, str]]:
    """Return tampu's connections to each node, by the node's port and their ID there."""
    return {
        (node.port, one["id"]): one
        for node in cluster.masters
        for one in node.client().client_list()
        if one["name"] == "tampu" and int(one["id"]) > node.reset_id
    }


def is_watching(cluster: Cluster) -> bool:
    """Return True if a worker has read its streams and watches them."""
    return any("t" in one["flags"] and one["cmd"] == "xreadgroup" for one in connections(cluster).values())


@pytest.fixture
def only_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no queue be read by blocking reads or by polling."""
    monkeypatch.setattr(link, "MAX_BLOCKING", 0)
    monkeypatch.setattr(reader, "WATCHED_SECS", 3600.0)


@contextlib.asynccontextmanager
async def working(cluster: Cluster, names: list[str], runs: Runs, **settings: Any) -> AsyncIterator[Worker]:
    queues = [Queue(name, url=cluster.url) for name in names]
    async with Worker(queues, runs, read_block_ms=3_600_000, **settings) as worker:
        yield worker


@pytest.mark.servers("cluster86")
@pytest.mark.usefixtures("only_reports")
async def test_a_watched_queue_is_read_when_a_job_is_added(server: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tampu.worker")
    runs, view = Runs(), WorkerView(server, "q0")
    async with working(server, ["q0", "q1"], runs):
        await until(lambda: is_watching(server), "it watches")
        for number in range(5):
            view.add(job_id=str(number))
            await until(lambda: runs[str(number)] == 1, "it has run")  # noqa: B023
            await until(view.is_settled, "it is settled")
        view.client.set(view.keys.paused, "1")
        await until(lambda: 'queue "q0" paused' in caplog.text, "it is paused")
        view.add(job_id="while paused")
        with pytest.raises(AssertionError, match="not within"):
            await until(lambda: runs["while paused"], "it runs", within_secs=0.3)
        view.client.delete(view.keys.paused)
        await until(lambda: runs["while paused"] == 1, "it runs when the queue is resumed")


@pytest.mark.servers("cluster86")
async def test_a_delayed_job_wakes_the_promoter(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_ups, "BLOCK_SECS", 3600.0)
    runs, names = Runs(), ["q0", "q1"]
    async with (
        working(server, names, runs, delayed_poll_interval_ms=3_600_000),
        Queue("q0", url=server.url) as first,
        Queue("q1", url=server.url) as second,
    ):
        for queue in (first, second, first, second):  # the first of each may come before it listens
            job_id = await queue.producer.add_in(0.05, None)
            await until(lambda: runs[job_id] == 1, "it has run")  # noqa: B023


@pytest.mark.servers("cluster86")
@pytest.mark.usefixtures("only_reports")
async def test_a_worker_that_watches_its_queues_stops(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "STOP_PATIENCE_SECS", 20.0)
    async with working(server, ["q0", "q1"], Runs()):
        await until(lambda: is_watching(server), "it watches")
        stopped_at = time.monotonic()
    assert time.monotonic() - stopped_at < 20


@pytest.mark.servers("cluster86")
@pytest.mark.usefixtures("only_reports")
@pytest.mark.parametrize("flag", ["t", "P"])
async def test_watched_queues_are_read_after_a_connection_is_lost(server: Cluster, flag: str) -> None:
    runs, names = Runs(), [f"q{number}" for number in range(6)]
    async with working(server, names, runs):
        await until(lambda: is_watching(server), "it watches")
        for (port, client_id), one in connections(server).items():
            if flag in one["flags"]:
                node = next(node for node in server.masters if node.port == port)
                node.client().client_kill_filter(_id=client_id)
        for name in names:
            WorkerView(server, name).add(job_id=name)
        await until(lambda: runs == dict.fromkeys(names, 1), "all have run")


@pytest.mark.servers("cluster86")
async def test_queues_work_without_permission_to_watch_keys(server: Cluster, troubles: Troubles) -> None:
    runs, names = Runs(), [f"q{number}" for number in range(6)]
    with acl_user(server, "ada", "pw", "~*", "&*", "+@all", "-client|tracking"):
        queues = [Queue(name, url=server.url.replace("://", "://ada:pw@")) for name in names]
        async with Worker(queues, runs, read_block_ms=3_600_000):
            for name in names:
                WorkerView(server, name).add(job_id=name)
            await until(lambda: runs == dict.fromkeys(names, 1), "all have run")
            async with Queue(names[-1], url=server.url) as queue:
                delayed = await queue.producer.add_in(0.05, None)
                await until(lambda: runs[delayed] == 1, "the delayed job has run")
    assert len(troubles.about("may not watch keys")) == 1


async def test_a_silent_node_does_not_hold_up_the_queues_of_others(fresh_server: Callable[..., Cluster]) -> None:
    cluster = fresh_server("cluster86", cluster_require_full_coverage="no")
    runs, names = Runs(), [f"q{number}" for number in range(12)]
    silent = cluster.node_of(QueueKeys(names[-1]).tag)
    views = {name: WorkerView(cluster, name) for name in names}
    reachable = [name for name, view in views.items() if cluster.node_of(view.keys.tag) is not silent]
    async with working(cluster, names, runs, claim_min_idle_ms=2000):
        for name, view in views.items():
            view.add(job_id=f"{name}-before")
        await until(lambda: len(runs) == len(names), "all work")
        silent.pause()
        try:
            for round_number in range(3):
                for name in reachable:
                    views[name].add(job_id=f"{name}-{round_number}")
                done = len(names) + (round_number + 1) * len(reachable)
                await until(lambda: len(runs) == done, "the others work", within_secs=5)  # noqa: B023
        finally:
            silent.resume()
        views[names[-1]].add(job_id="after")
        await until(lambda: runs["after"] == 1, "it works again")
    assert set(runs.values()) == {1}


async def test_slots_move_under_load_and_every_job_runs_once(fresh_server: Callable[..., Cluster]) -> None:
    cluster = fresh_server("cluster86")
    runs, names = Runs(), [f"q{number}" for number in range(24)]
    moving = [names[1], *names[6:10]]  # the first is read with blocking reads, the others are watched
    async with (
        working(cluster, names, runs, claim_min_idle_ms=1500, max_attempts=1) as worker,
        working(cluster, names, runs, claim_min_idle_ms=1500, max_attempts=1),  # takes over what loses its lease
        contextlib.AsyncExitStack() as stack,
    ):
        await until(lambda: worker.connections == link.MAX_BLOCKING + 5 * len(cluster.masters), "it is connected")
        await until(lambda: len(connections(cluster)) == 2 * worker.connections, "so is the other")
        before = {key for key, one in connections(cluster).items() if "b" not in one["flags"]}
        queues = [await stack.enter_async_context(Queue(name, url=cluster.url)) for name in names]
        added = [await queue.producer.add("hold") for queue in queues]
        await until(lambda: len(runs) == len(names), "a job of each queue runs")
        is_over = asyncio.Event()

        async def keep_adding(queue: Queue) -> None:
            while not is_over.is_set():
                added.extend(await queue.producer.add_bulk(["short"] * 3))
                await asyncio.sleep(0.01)

        producers = [asyncio.create_task(keep_adding(queue)) for queue in queues]
        for name in (*moving, moving[1]):  # the last moves twice
            await asyncio.to_thread(cluster.move_slot, QueueKeys(name).tag, other_node(cluster, name))
        await asyncio.sleep(2)  # longer than a lease that is not renewed
        is_over.set()
        await asyncio.gather(*producers)
        assert before <= set(connections(cluster))  # no queue's move has closed a shared connection
        runs.release.set()
        await until(lambda: len(runs) == len(added), "all have run", 60)
        await until(lambda: all(WorkerView(cluster, name).is_settled() for name in names), "all are settled", 60)
    print(f"{len(added)} jobs")
    assert runs == dict.fromkeys(added, 1)


def other_node(cluster: Cluster, name: str) -> Server:
    """Return the master that comes after the one of a queue."""
    number = cluster.masters.index(cluster.node_of(QueueKeys(name).tag))
    return cluster.masters[(number + 1) % len(cluster.masters)]
