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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu import Job

#: How long an idle worker is watched, in seconds: several rounds of its slowest loop.
WATCH_SECS = 10.0


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
        assert len(tampu_threads(threads)) <= 3  # besides the main thread
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
    assert calls <= 6 * count + 6  # and a few for all queues together


async def test_a_thousand_queues_start_within_five_seconds(server: Server) -> None:
    # In CPU time of this process, which a busy machine does not change; the server takes less than that.
    started, threads = time.process_time(), set(threading.enumerate())
    async with working(server, 1000):
        await until(lambda: is_reading(server), "it reads", within_secs=60)
        seconds = time.process_time() - started
        assert len(connections(server)) <= 6
        assert len(tampu_threads(threads)) <= 3
    print(f"1,000 queues: reading after {seconds:.2f} s")
    assert seconds < 5


@pytest.mark.servers("cluster86")
async def test_a_queue_on_a_cluster_has_four_connections(server: Cluster) -> None:
    async with working(server, 5) as worker:
        await until(lambda: worker.connections == 4 * 5, "all are connected")
