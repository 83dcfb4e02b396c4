"""Limits while workers die and the server restarts: they hold, order is kept, and no slot is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from support.waiting import until
from tampu import Limit, Queue
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from consume.workers import Fleet, WorkerProcess
    from servers.process import Server

KEYS = QueueKeys("q")
SETTINGS = {"claim_min_idle_ms": 300, "concurrency": 10, "max_attempts": 3}
TENANTS = ("a", "b", "c")
JOBS = 20


async def add_jobs(queue: Queue, secs: float) -> None:
    @queue.task(name="sleep", key=lambda tenant: tenant)
    async def sleep(tenant: str, number: int, secs: float) -> None: ...

    await sleep.add_bulk([(tenant, number, secs) for number in range(JOBS) for tenant in TENANTS])


def kill(fleet: Fleet, member: WorkerProcess) -> None:
    member.kill()
    fleet.journal.write("killed", "-", "-", member.process.pid)


def most_running(fleet: Fleet) -> Counter[str]:
    """Return how many jobs ran together at most, of each tenant and of all ("")."""
    running: dict[tuple[str, str, str], str] = {}
    most: Counter[str] = Counter()
    for what, tenant, number, pid in fleet.journal.lines():
        if what == "killed":
            running = {job: name for job, name in running.items() if job[2] != pid}
        elif what == "started":
            running[tenant, number, pid] = tenant
            now = Counter(running.values())
            most |= now + Counter({"": now.total()})
        else:
            running.pop((tenant, number, pid), None)
    return most


def done(fleet: Fleet) -> int:
    return len({(tenant, number) for what, tenant, number, _ in fleet.journal.lines() if what == "done"})


async def until_done(fleet: Fleet, count: int) -> None:
    await until(lambda: done(fleet) >= count, f"{count} jobs are done")


def is_at_rest(server: Server) -> bool:
    """Return True if no slot is booked and no key is counted as running, or waits."""
    _, gate, line, turn, _, parked, slots, _, _ = KEYS.gate
    client: Any = server.client()
    states = [value for name, value in client.hgetall(gate).items() if name[:1] in b":;"]
    return not client.exists(line, turn, parked, slots) and all(value[:8] == bytes(8) for value in states)


@pytest.mark.servers
async def test_limits_hold_while_workers_are_killed(server: Server, fleet: Fleet) -> None:
    async with Queue("q", url=server.url) as queue:
        await queue.limit(concurrency=5, per_key=Limit(concurrency=2))
        await add_jobs(queue, 0.03)
        workers = [fleet.start(server.url, "of_a_tenant", **SETTINGS) for _ in range(3)]
        for enough in (8, 16, 24):
            await until_done(fleet, enough)
            kill(fleet, workers.pop(0))
            workers.append(fleet.start(server.url, "of_a_tenant", **SETTINGS))
        await until(lambda: done(fleet) == JOBS * len(TENANTS), "all jobs are done")
        await until(lambda: is_at_rest(server), "all slots are free")
    most = most_running(fleet)
    assert most[""] <= 5
    assert max(most[tenant] for tenant in TENANTS) <= 2


@pytest.mark.servers("valkey", "redis62")
async def test_the_order_of_keys_survives_killed_workers_and_retries(server: Server, fleet: Fleet) -> None:
    async with Queue("q", url=server.url) as queue:
        await queue.limit(per_key=Limit(ordered=True))
        await add_jobs(queue, 0.01)
        workers = [fleet.start(server.url, "of_a_tenant", **SETTINGS) for _ in range(2)]
        for enough in (10, 20):
            await until_done(fleet, enough)
            kill(fleet, workers.pop(0))
            workers.append(fleet.start(server.url, "of_a_tenant", **SETTINGS))
        await until(lambda: done(fleet) == JOBS * len(TENANTS), "all jobs are done")
        await until(lambda: is_at_rest(server), "all slots are free")
    for tenant in TENANTS:
        order = [int(number) for what, name, number, _ in fleet.journal.lines() if what == "done" and name == tenant]
        # A job whose worker died after its handler had ended runs again: it is done twice in a row.
        assert [number for at, number in enumerate(order) if at == 0 or order[at - 1] != number] == list(range(JOBS))
    assert max(most_running(fleet)[tenant] for tenant in TENANTS) == 1


async def test_limits_hold_while_the_server_restarts(fresh_server: Callable[..., Any], fleet: Fleet) -> None:
    server = fresh_server(appendonly="yes", appendfsync="always")
    async with Queue("q", url=server.url) as queue:
        await queue.limit(concurrency=4, per_key=Limit(concurrency=2))
        await add_jobs(queue, 0.03)
        for _ in range(2):
            fleet.start(server.url, "of_a_tenant", **SETTINGS)
        for enough in (10, 25):
            await until_done(fleet, enough)
            server.kill()
            server.start()
        await until(lambda: done(fleet) == JOBS * len(TENANTS), "all jobs are done", within_secs=60)
        await until(lambda: is_at_rest(server), "all slots are free")
    most = most_running(fleet)
    assert most[""] <= 4
    assert max(most[tenant] for tenant in TENANTS) <= 2
