"""Limits of a queue, its tasks and its keys, as applications use them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import Hold, Limit, Queue
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from servers.process import Server


class Runs:
    """Records runs: which run now, how many ran together at most, and in which order they started."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.started: list[tuple[str, int]] = []
        self.release = asyncio.Event()
        self.release.set()

    async def run(self, name: str, number: int) -> None:
        self.started.append((name, number))
        for each in (name, ""):
            self.now[each] += 1
            self.most[each] = max(self.most[each], self.now[each])
        try:
            await asyncio.sleep(0.002)
            await self.release.wait()
        finally:
            self.now[name] -= 1
            self.now[""] -= 1

    async def have_started(self, count: int) -> None:
        await until(lambda: len(self.started) >= count, f"{count} jobs have started")


@pytest.fixture
def runs() -> Runs:
    return Runs()


def tenant_task(queue: Queue, runs: Runs) -> Any:
    @queue.task(key=lambda tenant: tenant)
    async def bill(tenant: str, number: int) -> None:
        await runs.run(tenant, number)

    return bill


@pytest.mark.servers
async def test_no_more_jobs_run_than_the_limits_of_queue_task_and_key_allow(queue: Queue, runs: Runs) -> None:
    @queue.task
    async def charge(number: int) -> None:
        await runs.run("charge", number)

    bill = tenant_task(queue, runs)
    await queue.limit(concurrency=6, per_key=Limit(concurrency=2))
    await queue.limit(task="charge", concurrency=1)
    await queue.limit(key="big", concurrency=3)
    await bill.add_bulk([(tenant, number) for number in range(10) for tenant in ("acme", "big", "small")])
    await bill.add_bulk([("big", number) for number in range(30)])
    await charge.add_bulk([(number,) for number in range(10)])
    runs.release.clear()
    async with working(queue), working(queue):
        await runs.have_started(6)
        assert runs.now[""] == 6
        runs.release.set()
        await runs.have_started(70)
    limits = {"": 6, "acme": 2, "big": 3, "small": 2, "charge": 1}
    assert all(runs.most[name] <= most for name, most in limits.items()), runs.most


async def test_limits_change_while_jobs_run(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    runs.release.clear()
    await queue.limit(per_key=Limit(concurrency=1))
    await bill.add_bulk([("acme", number) for number in range(10)])
    async with working(queue, concurrency=20):
        await runs.have_started(1)
        await queue.limit(key="acme", concurrency=3)
        await runs.have_started(3)
        await queue.limit(per_key=Limit(concurrency=5))
        await queue.clear_limits(key="acme")
        await runs.have_started(5)
        await queue.limit(concurrency=6, per_key=Limit(concurrency=20))
        await runs.have_started(6)
        assert runs.now["acme"] == 6
        await queue.clear_limits()
        await runs.have_started(10)
        runs.release.set()
    assert not (await queue.limits()).queue.is_set


async def test_a_queue_whose_limits_are_cleared_is_read_as_before(queue: Queue, runs: Runs, server: Server) -> None:
    bill = tenant_task(queue, runs)
    await queue.limit(concurrency=1)
    await bill.add("acme", 1)
    async with working(queue):
        await runs.have_started(1)
        await queue.clear_limits()
        client = server.client()
        await until(lambda: not client.exists(queue.keys.limits), "the group is open")
        assert not client.exists(*queue.keys.gate[1:8])
        await bill.add("acme", 2)
        await runs.have_started(2)


async def test_concurrency_0_pauses_one_tenant(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    await queue.limit(key="acme", concurrency=0)
    for number in range(3):
        await bill.add("acme", number)
        await bill.add("other", number)
    async with working(queue):
        await runs.have_started(3)
        assert {tenant for tenant, _ in runs.started} == {"other"}
        await queue.limit(key="acme", concurrency=math.inf)
        await runs.have_started(6)


async def test_a_rate_spreads_starts_evenly(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    await queue.limit(per_key=Limit(rate="50/s"))
    await bill.add_bulk([(tenant, number) for number in range(20) for tenant in ("acme", "other")])
    async with working(queue):
        await runs.have_started(1)
        began = time.monotonic()
        await runs.have_started(40)
    # 20 starts at 20 ms: the first at once, and up to 50 ms early.
    assert 0.3 < time.monotonic() - began < 3


async def test_a_flood_of_one_tenant_does_not_delay_the_others(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    await queue.limit(concurrency=4)
    await bill.add_bulk([("flood", number) for number in range(600)])
    await bill.add_bulk([(f"t{tenant}", number) for number in range(10) for tenant in range(4)])
    async with working(queue):
        await runs.have_started(120)
    first = {tenant: [name for name, _ in runs.started].index(tenant) for tenant in ("t0", "t1", "t2", "t3")}
    assert max(first.values()) < 50
    shares = Counter(name for name, _ in runs.started[:60])
    assert all(shares[tenant] == 10 for tenant in first)


async def test_a_key_of_weight_3_gets_three_times_the_jobs(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    await queue.limit(concurrency=1, per_key=Limit(weight=1))
    await queue.limit(key="gold", weight=3)
    await bill.add_bulk([(tenant, number) for number in range(100) for tenant in ("gold", "tin")])
    async with working(queue):
        await runs.have_started(80)
    shares = Counter(name for name, _ in runs.started[:80])
    assert shares["gold"] == pytest.approx(60, abs=2)


@pytest.mark.servers
async def test_ordered_jobs_of_a_key_run_in_order_through_retries(queue: Queue) -> None:
    ended: list[tuple[str, int]] = []
    failed: set[tuple[str, int]] = set()

    @queue.task(key=lambda tenant: tenant, attempts=3)
    async def bill(tenant: str, number: int) -> None:
        if number % 3 == 0 and (tenant, number) not in failed:
            failed.add((tenant, number))
            raise ValueError("try again")
        ended.append((tenant, number))

    await queue.limit(per_key=Limit(ordered=True))
    await bill.add_bulk([(tenant, number) for number in range(12) for tenant in ("a", "b")])
    async with working(queue), working(queue):
        await until(lambda: len(ended) == 24, "all jobs have ended")
    for tenant in "ab":
        assert [number for name, number in ended if name == tenant] == list(range(12))


async def test_hold_lets_the_key_rest_and_uses_no_attempt(queue: Queue) -> None:
    started: list[tuple[str, float]] = []

    @queue.task(key=lambda tenant: tenant, attempts=1)
    async def call(tenant: str) -> None:
        started.append((tenant, time.monotonic()))
        if len([name for name, _ in started if name == "acme"]) == 1 and tenant == "acme":
            raise Hold(0.5)

    await queue.limit(concurrency=1)
    jobs = await call.add_bulk([("acme",), ("acme",), ("other",), ("acme",)])
    async with working(queue):
        for job in jobs:
            await job.result()
    times = [at for name, at in started if name == "acme"]
    assert len(times) == 4
    assert times[1] - times[0] > 0.45
    assert next(at for name, at in started if name == "other") - times[0] < 0.45


async def test_hold_without_limits_delays_only_the_job(queue: Queue) -> None:
    runs: list[int] = []

    @queue.task(attempts=1)
    async def call(number: int) -> int:
        runs.append(number)
        if runs == [1]:
            raise Hold(0.05)
        return number

    job = await call.add(1)
    async with working(queue):
        assert await job.result() == 1
    assert runs == [1, 1]


async def test_a_key_comes_from_using_the_task_or_the_name(queue: Queue) -> None:
    seen: list[tuple[str | None, int]] = []

    @queue.task(key=lambda tenant: tenant.lower())
    async def keyed(tenant: str, number: int = 0) -> None:
        from tampu import current_job

        job = current_job()
        assert job is not None
        seen.append((job.key, number))

    await keyed.add("ACME", 1)
    await keyed.using(key="own").add("ACME", 2)
    await keyed.add_bulk([("A", 3), ("B", 4), ("A", 5)])
    await queue.add("keyed", {"tenant": "ByName", "number": 6})
    await keyed.add_in(0.001, "Delayed", 7)
    await asyncio.to_thread(keyed.sync.add, "SYNC", 8)
    async with working(queue):
        await until(lambda: len(seen) == 8, "all have run")
    assert sorted(seen, key=lambda one: one[1]) == [
        ("acme", 1), ("own", 2), ("a", 3), ("b", 4), ("a", 5), ("byname", 6), ("delayed", 7), ("sync", 8),
    ]  # fmt: skip


async def test_a_bulk_of_a_task_with_keys_returns_jobs_in_the_order_of_the_calls(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    jobs = await bill.add_bulk([("b", 0), ("a", 1), ("b", 2)])
    found = [await job.state() for job in jobs]
    assert [job.state for job in found] == ["waiting"] * 3
    async with working(queue):
        for job in jobs:
            await job.result()
    assert len({job.id for job in jobs}) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "pass at least one of"),
        ({"concurrency": -1}, "concurrency must be a whole number from 0"),
        ({"rate": "fast"}, "rate must be starts per unit of time"),
        ({"key": "", "concurrency": 1}, "key must be text"),
        ({"key": "x" * 300, "concurrency": 1}, "key must be text"),
        ({"key": "a", "task": "b", "concurrency": 1}, "key or task, not both"),
        ({"key": "a", "per_key": Limit(concurrency=1)}, "per_key is the limit of every key"),
        ({"weight": 2}, "weight and ordered belong to keys"),
        ({"task": "a", "ordered": True}, "weight and ordered belong to keys"),
        ({"per_key": 5}, "per_key must be a Limit"),
    ],
)
async def test_a_limit_that_makes_no_sense_is_refused(queue: Queue, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await queue.limit(**call)
    assert not (await queue.limits()).keys


async def test_a_key_function_that_fails_adds_nothing(queue: Queue) -> None:
    @queue.task(key=lambda order: order["tenant"])
    async def bill(order: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match="its key function raised KeyError: 'tenant'; nothing was sent"):
        await bill.add({})
    with pytest.raises(ConfigError, match="the key of task 'bill' must be text"):
        await bill.add({"tenant": 7})
    with pytest.raises(ConfigError, match="its key function takes customer, but the task's parameters are order"):
        queue.task(name="other", key=lambda customer: customer)(lambda order: None)
    assert await queue.jobs("waiting") == []


async def test_limits_are_stored_as_they_were_set(queue: Queue) -> None:
    await queue.limit(concurrency=200, per_key=Limit(concurrency=2, rate="100/m"))
    await queue.limit(key="acme", concurrency=10, weight=3)
    await queue.limit(task="charge", rate="10/s", burst=5)
    limits = await asyncio.to_thread(queue.sync.limits)
    assert limits.queue == Limit(concurrency=200)
    assert limits.per_key == Limit(concurrency=2, rate="100/m")
    assert limits.keys == {"acme": Limit(concurrency=10, weight=3)}
    assert limits.tasks == {"charge": Limit(rate="10/s", burst=5)}
    await asyncio.to_thread(queue.sync.clear_limits, key="acme")
    assert (await queue.limits()).keys == {}


@pytest.mark.servers
async def test_purge_deletes_what_waits_for_a_limit(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    runs.release.clear()
    await queue.limit(concurrency=2)
    jobs = await bill.add_bulk([("acme", number) for number in range(700)])
    async with working(queue):
        await runs.have_started(2)
        waiting = await queue.jobs("waiting", limit=1000)
        assert {job.id for job in waiting} == {job.id for job in jobs[2:]}
        assert await queue.purge() == 698
        await bill.add("acme", 1000)
        runs.release.set()
        await runs.have_started(3)
    assert [number for _, number in runs.started] == [0, 1, 1000]


async def test_a_job_that_waits_for_a_limit_can_be_cancelled(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    await queue.limit(per_key=Limit(concurrency=1))
    first, second, third = await bill.add_bulk([("acme", number) for number in range(3)])
    assert await queue.cancel(second.id) == "requested"
    async with working(queue):
        await first.result()
        await third.result()
    assert [number for _, number in runs.started] == [0, 2]


async def test_why_a_job_waits_names_the_limit(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    runs.release.clear()
    await queue.limit(concurrency=5, per_key=Limit(concurrency=1, rate="1/h"))
    await queue.limit(task="bill", concurrency=9)
    first, second, other = await bill.add_bulk([("acme", 0), ("acme", 1), ("other", 0)])
    admin = queue.producer.admin
    async with working(queue):
        await runs.have_started(2)
        reasons = await admin.why_held(await second.state())
        assert reasons[0] == "key 'acme' is at its limit: 1 of 1 jobs run"
        assert reasons[1].startswith("key 'acme' is at its rate of 1/h: the next job may start in 3")
        runs.release.set()
        await first.result()
        await other.result()
        await queue.limit(concurrency=0)
        assert "the queue is at its limit: 0 of 0 jobs run" in await admin.why_held(await second.state())
    gate = await admin.read_gate()
    assert (gate.running, gate.waiting) == (0, 1)


async def test_slots_of_a_worker_that_went_away_are_freed(queue: Queue, runs: Runs) -> None:
    bill = tenant_task(queue, runs)
    runs.release.clear()
    await queue.limit(per_key=Limit(concurrency=2))
    await bill.add_bulk([("acme", number) for number in range(4)])
    async with working(queue, shutdown_deadline_secs=0, claim_min_idle_ms=300):
        await runs.have_started(2)
    runs.release.set()
    async with working(queue, claim_min_idle_ms=300):
        await runs.have_started(6)
        await queue.drain(20)
    assert runs.most["acme"] <= 4
    assert (await queue.producer.admin.read_gate()).waiting == 0


async def test_a_limited_queue_is_drained_while_the_server_is_out_of_memory(
    queue: Queue, runs: Runs, server: Server
) -> None:
    bill = tenant_task(queue, runs)
    runs.release.clear()
    await queue.limit(concurrency=1)
    await bill.add_bulk([("acme", number) for number in range(10)])
    async with working(queue):
        await runs.have_started(1)
        server.config_set(maxmemory=1, maxmemory_policy="noeviction")
        runs.release.set()
        await runs.have_started(10)
    server.config_set(maxmemory=0)


@pytest.mark.servers
async def test_workers_without_limits_get_nothing_from_a_limited_queue(
    queue: Queue, runs: Runs, server: Server
) -> None:
    bill = tenant_task(queue, runs)
    client, stream = server.client(), queue.keys.stream
    client.xgroup_create(stream, "default", "0", mkstream=True)
    await queue.limit(concurrency=0)
    await bill.add("acme", 1)
    assert not client.xreadgroup("default", "peer", {stream: ">"})
    async with working(queue):
        await queue.limit(concurrency=1)
        await runs.have_started(1)
        await queue.clear_limits()
        await until(lambda: not client.exists(queue.keys.limits), "the group is open")
    await bill.add("acme", 2)
    assert client.xreadgroup("default", "peer", {stream: ">"})
