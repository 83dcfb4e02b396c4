"""A worker's connections, threads and idle commands do not grow with the number of its queues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.waiting import until
from tampu import Queue, Worker
from tampu.consume import link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu import Job

#: How long an idle worker is watched, in seconds: several rounds of its slowest loop, and a little less than a multiple
#: of the intervals, so that no round more is counted if this process is late.
WATCH_SECS = 9.8
CLUSTER_WATCH_SECS = 5.8


async def noop(job: Job[Any]) -> None:
    return None


@contextlib.asynccontextmanager
async def working(server: Server | Cluster, count: int, **settings: Any) -> AsyncIterator[Worker]:
    """Run a worker of `count` queues until the block ends."""
    queues = [Queue(f"q{number}", url=server.url) for number in range(count)]
    async with Worker(queues, noop, **settings) as worker:
        yield worker


def connections(server: Server) -> list[dict[str, str]]:
    found = server.client().client_list()
    return [one for one in found if one["name"] == "tampu" and int(one["id"]) > server.reset_id]


def is_reading(server: Server) -> bool:
    """Return True if a worker waits for entries at the server."""
    return any(one["cmd"] == "xreadgroup" and "b" in one["flags"] for one in connections(server))


def is_listening(server: Server) -> bool:
    """Return True if a promoter waits for wake-ups at the server."""
    return any(one["cmd"] == "xread" and "b" in one["flags"] for one in connections(server))


def tampu_threads(before: set[threading.Thread]) -> list[str]:
    """Return the threads that tampu has started since; earlier tests in this process may have left some."""
    new = set(threading.enumerate()) - before
    return [thread.name for thread in new if thread.name.startswith("tampu")]


@pytest.mark.untraced
@pytest.mark.parametrize("count", [1, 20, 100])
async def test_an_idle_worker_costs_the_same_whatever_the_number_of_queues(server: Server, count: int) -> None:
    client, threads = server.client(), set(threading.enumerate())
    async with working(server, count):
        await until(lambda: is_reading(server), "it reads")
        await until(
            lambda: sum(client.exists(f"{{chasqui:q{n}}}:scheduler:lock") for n in range(count)) == count, "led"
        )
        assert len(connections(server)) <= 6
        assert len(tampu_threads(threads)) <= 1  # besides the main thread
        client.config_resetstat()
        cpu = time.process_time()
        await asyncio.sleep(WATCH_SECS)
        cpu = time.process_time() - cpu
        stats, commands = client.info("stats"), client.info("commandstats")
    requests = stats["total_reads_processed"] / WATCH_SECS
    calls = sum(one["calls"] for one in commands.values()) / WATCH_SECS
    print(
        f"{count} queues: {requests:.1f} requests/s, {calls:.1f} commands/s, {100 * cpu / WATCH_SECS:.1f} % of a core"
    )
    assert requests <= 25
    assert calls <= 25 + 6 * count


@pytest.mark.untraced
async def test_dead_consumers_of_all_queues_are_looked_for_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SWEEP_INTERVAL_SECS", 1.0)
    client = server.client()
    async with working(server, 100):
        await until(lambda: is_reading(server), "it reads")
        await asyncio.sleep(1)  # the first checks of each queue
        client.config_resetstat()
        await asyncio.sleep(3)
        requests = client.info("stats")["total_reads_processed"] / 3
    assert requests <= 50  # one by one: 400


@pytest.mark.untraced
@pytest.mark.parametrize("count", [1, 20, 100])
async def test_jobs_that_are_not_due_yet_cost_few_commands(server: Server, count: int) -> None:
    client = server.client()
    for number in range(count):
        async with Queue(f"q{number}", url=server.url) as queue:
            await queue.producer.add_in(3600, None)
    locks = [f"{{chasqui:q{number}}}:promoter:lock" for number in range(count)]
    async with working(server, count):
        await until(lambda: client.exists(*locks) == count, "it leads all queues")
        await until(lambda: is_listening(server), "it listens")
        await asyncio.sleep(1)  # the last of the frequent polls from before it listened
        client.config_resetstat()
        await asyncio.sleep(WATCH_SECS)
        stats, commands = client.info("stats"), client.info("commandstats")
    requests = stats["total_reads_processed"] / WATCH_SECS
    calls = sum(one["calls"] for one in commands.values()) / WATCH_SECS
    print(f"{count} queues: {requests:.1f} requests/s, {calls / count:.1f} commands/s per queue")
    assert requests <= 25
    # 6 per queue and a few for all queues together, or 7 if one more round of renewals falls into the time that is
    # watched. At the full rate of polls it would be 15.
    assert calls <= 8 * count + 8


async def test_a_thousand_queues_start_within_five_seconds_and_run_jobs(server: Server) -> None:
    # In CPU time of this process, which a busy machine does not change; the server takes less than that.
    started, threads = time.process_time(), set(threading.enumerate())
    client = server.client()
    streams = [f"{{chasqui:q{number}}}:stream" for number in range(0, 1000, 10)]
    async with working(server, 1000):
        await until(lambda: is_reading(server), "it reads", within_secs=60)
        seconds = time.process_time() - started
        assert len(connections(server)) <= 6
        assert len(tampu_threads(threads)) <= 1
        assert seconds < 5
        for number in range(0, 1000, 10):
            async with Queue(f"q{number}", url=server.url) as queue:
                await queue.producer.add(None)
        await until(lambda: not any(map(client.xlen, streams)), "all jobs are done", within_secs=60)
        done = time.process_time() - started
    print(f"1,000 queues: reading after {seconds:.2f} s, 100 jobs added and done after {done:.2f} s")
    assert done < 10


@pytest.mark.untraced
@pytest.mark.servers("cluster86")
@pytest.mark.parametrize(("count", "most"), [(1, 6), (20, 19), (100, 19)])
async def test_connections_to_a_cluster_depend_on_its_nodes_not_on_queues(
    server: Cluster, count: int, most: int
) -> None:
    nodes, threads = [node.client() for node in server.masters], set(threading.enumerate())
    locks = [f"{{chasqui:q{number}}}:promoter:lock" for number in range(count)]
    client = server.client()
    async with working(server, count) as worker:
        await until(lambda: sum(client.exists(lock) for lock in locks) == count, "it leads all queues")
        await until(lambda: worker.connections == most, "all are connected")
        assert sum(len(connections(node)) for node in server.masters) == most
        assert len(tampu_threads(threads)) <= 1
        await asyncio.sleep(1)  # the last of the frequent polls from before it listened
        for node in nodes:
            node.config_resetstat()
        cpu = time.process_time()
        await asyncio.sleep(CLUSTER_WATCH_SECS)
        cpu = time.process_time() - cpu
        requests = [node.info("stats")["total_reads_processed"] / CLUSTER_WATCH_SECS for node in nodes]
        calls = sum(one["calls"] for node in nodes for one in node.info("commandstats").values()) / CLUSTER_WATCH_SECS
    print(
        f"{count} queues: {', '.join(f'{number:.1f}' for number in requests)} requests/s per node, "
        f"{calls / count:.1f} commands/s per queue, {100 * cpu / CLUSTER_WATCH_SECS:.1f} % of a core"
    )
    assert max(requests) <= 25
    assert calls <= 12 * count + 25
