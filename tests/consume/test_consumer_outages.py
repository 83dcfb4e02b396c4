"""A server that is unreachable for longer than a lease: no worker dies, so no job may run twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import redis

from consume.views import WorkerView
from consume.workers import QUEUE, consuming
from support.users import acl_user
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from consume.workers import Fleet
    from servers.process import Server
    from tampu.wire.job import Job

LEASE_MS = 1500
OUTAGE_SECS = 2 * LEASE_MS / 1000
JOB_SECS = OUTAGE_SECS + 3.0
JOBS = 12
#: Repetitions of each kind of outage. The figures in the docs were measured with 20.
TRIES = int(os.environ.get("TAMPU_OUTAGE_TRIES", "1"))


@contextlib.contextmanager
def killed_and_restarted(server: Server) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


@contextlib.contextmanager
def paused(server: Server) -> Iterator[None]:
    server.client().execute_command("CLIENT", "PAUSE", int(OUTAGE_SECS * 1000), "ALL")
    yield


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """Run a script that does not end: after 100 ms the server answers everything else with BUSY."""
    server.config_set(busy_reply_threshold=100)
    script = "local t = redis.call('TIME')[1] + ARGV[1] while redis.call('TIME')[1] + 0 < t do end"
    client = server.client(socket_timeout=60)

    def run() -> None:
        with contextlib.suppress(redis.RedisError):
            client.eval(script, 0, int(OUTAGE_SECS) + 1)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@contextlib.contextmanager
def no_replicas(server: Server) -> Iterator[None]:
    """Make the server refuse every write."""
    server.config_set(min_replicas_to_write=1)
    yield
    server.config_set(min_replicas_to_write=0)


@pytest.mark.timeout(60 + 40 * TRIES)
@pytest.mark.parametrize("outage", [killed_and_restarted, stopped, paused, busy, no_replicas])
async def test_no_job_runs_twice_because_the_server_was_unreachable(
    fresh_server: Callable[..., Server], fleet: Fleet, outage: Callable[[Server], Any]
) -> None:
    server = fresh_server("redis86", appendonly="yes", appendfsync="always")
    view = WorkerView(server, QUEUE)
    for _ in range(3):
        fleet.start(server.url, "sleeping", claim_min_idle_ms=LEASE_MS, concurrency=6)
    for number in range(TRIES):
        ids = view.add_many([JOB_SECS] * JOBS)
        await until(lambda ids=ids: len(_starts(fleet, ids)) == JOBS, "all have started", within_secs=30)
        with outage(server):
            time.sleep(OUTAGE_SECS)  # noqa: ASYNC251 - the length of the outage is what is tested
        await until(lambda ids=ids: len(_ends(fleet, ids)) >= JOBS, "all are done", within_secs=40)
        await until(view.is_settled, "and settled", within_secs=20)
        reruns = {job_id: count for job_id, count in _starts(fleet, ids).items() if count > 1}
        assert reruns == {}, f"try {number + 1}"
        assert view.dead_letters() == []
        fleet.journal.path.unlink()  # the next repetition uses the same ids


def _starts(fleet: Fleet, ids: list[str]) -> Counter[str]:
    return Counter(job_id for job_id in fleet.journal.of("started") if job_id in ids)


def _ends(fleet: Fleet, ids: list[str]) -> list[str]:
    return [job_id for job_id in fleet.journal.of("done") if job_id in ids]


async def test_a_user_without_newer_commands_still_renews_its_leases(view: WorkerView) -> None:
    """A worker must not lose leases under an ACL that was made for an earlier release."""
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)
        await asyncio.sleep(1.2)

    rules = ("~*", "+@all", "-pttl", "-pexpire", "-hget", "-hset")
    with acl_user(view.server, "old", "pw", *rules):
        url = view.server.url.replace("://", "://old:pw@")
        async with consuming(url, handler), consuming(url, handler):
            job_id = view.add(1)
            await until(view.is_settled, "it is done, after three leases", within_secs=20)
    assert runs == [job_id]
