"""Leases: a live worker keeps its jobs, does not start jobs whose lease it lost, and starts no job twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from consume.views import WorkerView
from consume.workers import QUEUE, Stuck, consuming, reading_link
from support.proxy import Proxy
from support.waiting import until
from tampu.base.clock import boot_clock_ns
from tampu.config import ConsumerConfig
from tampu.consume import admission, execute, leases
from tampu.consume.inflight import InFlight
from tampu.consume.leases import Leases
from tampu.consume.outcomes import Observers
from tampu.metrics import InMemorySink
from tampu.redis.client import Client
from tampu.redis.settings import parse_url
from tampu.wire.envelope import encode_envelope
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from collections.abc import Callable

    from consume.workers import Fleet
    from servers.process import Server
    from support.troubles import Troubles
    from tampu.wire.job import Job

CLAIM_MS = 300


async def noop(job: Job[Any]) -> None:
    return None


def take_over(view: WorkerView, consumer: str, *, idle: int = 0) -> list[str]:
    """Claim all pending entries for another consumer, like a worker that takes over from a dead one."""
    taken = []
    for entry in view.pending():
        claimed = view.client.xclaim(view.keys.stream, "default", consumer, idle, [entry["message_id"]])
        taken += [entry_id for entry_id, _ in claimed]
    return taken


# --- long handlers


@pytest.mark.servers
async def test_a_handler_five_times_longer_than_the_claim_time_runs_once(view: WorkerView) -> None:
    """Finding 13: also with a second worker that looks for idle entries."""
    runs: list[int] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.attempt)
        await asyncio.sleep(5 * CLAIM_MS / 1000)

    settings = {"claim_min_idle_ms": CLAIM_MS}
    async with consuming(view.server.url, handler, **settings), consuming(view.server.url, handler, **settings):
        job_id = view.add()
        await until(lambda: "completed" in view.event_names(job_id), "it is done")
        await until(view.is_settled, "nothing is left")
    assert runs == [0]
    assert view.event_names(job_id) == ["active", "completed"]


@pytest.mark.servers
async def test_a_blocking_handler_and_jobs_prefetched_behind_it_run_once(view: WorkerView, fleet: Fleet) -> None:
    """Finding 13: the lease thread also renews during `time.sleep` on the event loop, and for jobs that wait."""
    seconds = 5 * CLAIM_MS / 1000
    settings = {"claim_min_idle_ms": CLAIM_MS, "concurrency": 2}
    first = fleet.start(view.server.url, "blocking", **settings)
    ids = [view.add(seconds), view.add(0.0), view.add(0.0)]
    await until(lambda: fleet.journal.of("started"), "the first runs")

    async def elsewhere(job: Job[Any]) -> None:
        fleet.journal.write("started", job.id, "elsewhere")

    async with consuming(view.server.url, elsewhere, **settings):
        await until(lambda: len(set(fleet.journal.of("started"))) == 3, "all have started")
        await until(view.is_settled, "all are done")
    first.stop()
    assert Counter(fleet.journal.of("started")) == dict.fromkeys(ids, 1)


async def test_jobs_delivered_while_the_loop_is_blocked_wait_for_it(view: WorkerView, fleet: Fleet) -> None:
    """They are pending for the blocked worker but still in its socket. Each job has a single attempt."""
    first = fleet.start(view.server.url, "blocking_soon", claim_min_idle_ms=CLAIM_MS, concurrency=2)
    view.add(6 * CLAIM_MS / 1000)
    await until(lambda: fleet.journal.of("blocks"), "its loop is blocked, with a read in flight")
    once = view.add(0.0, retry=JobRetryOverride(1))
    await until(lambda: len(view.pending()) == 2, "the next is delivered to it")

    async def elsewhere(job: Job[Any]) -> None:
        fleet.journal.write("started", job.id, "elsewhere")

    async with consuming(view.server.url, elsewhere, claim_min_idle_ms=CLAIM_MS):
        await until(view.is_settled, "all are done")
    first.stop()
    assert fleet.journal.of("started").count(once) == 1
    assert not view.dead_letters()


@pytest.mark.servers
async def test_two_workers_with_prefetch_run_ten_slow_jobs_ten_times(view: WorkerView) -> None:
    """Finding 14: leases of jobs that wait in a worker are renewed too."""
    runs: Counter[str] = Counter()
    most_waiting = 0

    async def handler(job: Job[Any]) -> None:
        runs[job.id] += 1
        if job.payload:
            nonlocal most_waiting
            most_waiting = max(most_waiting, *(worker.occupied - worker.running for worker in workers))
            await asyncio.sleep(CLAIM_MS * 0.6 / 1000)

    # Quick jobs first: a fast worker reads ahead, and then holds slow jobs for longer than a lease.
    ids = view.add_many([0] * 300 + [1] * 10)
    settings = {"claim_min_idle_ms": CLAIM_MS, "concurrency": 1}
    async with (
        consuming(view.server.url, handler, **settings) as one,
        consuming(view.server.url, handler, **settings) as two,
    ):
        workers = (one, two)
        await until(view.is_settled, "all are done", 30)
    assert runs == dict.fromkeys(ids, 1)
    assert most_waiting > 2, "the test needs prefetched jobs"


# --- lost leases


@pytest.mark.servers
async def test_a_lease_lost_while_waiting_means_not_started(view: WorkerView, troubles: Troubles) -> None:
    stuck = Stuck()
    async with consuming(view.server.url, stuck, claim_min_idle_ms=CLAIM_MS, concurrency=1) as worker:
        first = view.add()
        await stuck.runs()
        # Delivered by the test: a worker reads ahead only while it is fast.
        waiting = view.add()
        (entry_id,) = worker.take_in(view, 1)
        view.client.xclaim(view.keys.stream, "default", "another", 0, [entry_id])
        await until(lambda: troubles.about(f"lost the lease of job {waiting} "), "its loss is noticed")
        assert worker.held == 1, "only the first is held"
        stuck.release.set()
        await until(lambda: "completed" in view.event_names(first), "the first is done")
        await until(lambda: worker.occupied == 0, "nothing waits")
        assert waiting not in stuck.started
        assert view.client.xack(view.keys.stream, "default", entry_id) == 1, "it still belongs to the other consumer"


@pytest.mark.servers
async def test_a_lost_lease_is_not_stolen_back(view: WorkerView, troubles: Troubles) -> None:
    stuck = Stuck()
    async with consuming(view.server.url, stuck, claim_min_idle_ms=CLAIM_MS):
        view.add()
        await stuck.runs()
        take_over(view, "another")
        await until(lambda: troubles.about(f"lost the lease of job {stuck.started[0]} "), "the loss is noticed")
        (pending,) = view.pending()
        assert pending["consumer"] == b"another"
        stuck.release.set()
        await until(view.is_settled, "its success counts, as the other consumer had not finished")


async def test_renewing_keeps_the_delivery_count(view: WorkerView) -> None:
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        await release.wait()

    async with consuming(view.server.url, handler, claim_min_idle_ms=60):
        view.add()
        (pending,) = await until(view.pending, "it runs")
        for _ in range(5):
            idle_ms = pending["time_since_delivered"]
            while pending["time_since_delivered"] >= idle_ms:  # until it is renewed
                idle_ms = pending["time_since_delivered"]
                await asyncio.sleep(0.005)
                (pending,) = view.pending()
        release.set()
    assert pending["times_delivered"] == 1


@pytest.mark.servers
async def test_a_stale_workers_failure_does_not_overwrite_the_owners_success(view: WorkerView) -> None:
    release = asyncio.Event()
    started: list[str] = []

    async def stale(job: Job[Any]) -> None:
        started.append("stale")
        await release.wait()
        raise ValueError("too late")

    async with consuming(view.server.url, stale, claim_min_idle_ms=60_000, consumer_id="stale", max_attempts=1):
        job_id = view.add()
        await until(lambda: started, "the stale one runs it")
        take_over(view, "owner")
        release.set()
        other = view.add()
        await until(lambda: "dlq" in view.event_names(other), "a later failure is written")
        (pending,) = view.pending()
        assert pending["consumer"] == b"owner", "only the owner may settle it"
        assert "failed" not in view.event_names(job_id)
        assert len(view.dead_letters()) == 1
        assert not view.delayed()


@pytest.mark.servers
@pytest.mark.parametrize("events", [True, False], ids=["events", "no-events"])
async def test_a_stale_workers_late_success_counts_while_the_entry_is_pending(view: WorkerView, events: bool) -> None:
    stuck = Stuck()
    async with consuming(view.server.url, stuck, claim_min_idle_ms=60_000, events_enabled=events):
        view.add()
        await stuck.runs()
        take_over(view, "owner")
        stuck.release.set()
        await until(view.is_settled, "its success is written")


async def test_an_entry_that_runs_in_this_process_is_never_started_again(view: WorkerView) -> None:
    """This holds even if leases are not renewed at all."""
    stuck = Stuck()
    sink = InMemorySink()
    settings = {"claim_min_idle_ms": 100, "concurrency": 5, "metrics": sink}
    async with consuming(view.server.url, stuck, **settings) as worker:
        view.add()
        await stuck.runs()
        await worker.stop_renewing()
        await until(lambda: view.pending()[0]["time_since_delivered"] > 400, "its lease expired long ago")
        view.client.xclaim(view.keys.stream, "default", worker.config.consumer_id, 0, [view.pending()[0]["message_id"]])
        another = view.add()
        await until(lambda: another in stuck.started, "another is started")
        stuck.release.set()
        await until(view.is_settled, "both are done")
    assert len(stuck.started) == 2


@pytest.mark.servers("valkey", "redis86")
async def test_an_entry_delivered_again_while_it_runs_is_not_started_again(view: WorkerView) -> None:
    """A group that was deleted and created again delivers all entries again, also those that run."""
    stuck = Stuck(only="waits")
    async with consuming(view.server.url, stuck, claim_min_idle_ms=60_000):
        first = view.add("waits")
        await stuck.runs()
        view.client.xgroup_destroy(view.keys.stream, "default")
        second = view.add()
        await until(lambda: second in stuck.started, "the next job has run")
        stuck.release.set()
        await until(view.is_settled, "both are settled")
    assert stuck.started == [first, second]


# --- suspended processes and servers


async def test_a_suspended_worker_does_not_start_jobs_taken_over_by_others(view: WorkerView, fleet: Fleet) -> None:
    """After a SIGSTOP timers fire before leases are renewed: waiting jobs must be confirmed before they start."""
    settings = {"claim_min_idle_ms": CLAIM_MS, "concurrency": 1}
    frozen = fleet.start(view.server.url, "sleeping_after_quick", **settings)
    # Enough quick jobs that it reads ahead, then a slow one: others wait behind it in the process.
    ids = view.add_many([0.0] * 300 + [0.2] + [0.01] * 30)
    slow, behind = ids[300], ids[301:]
    await until(lambda: slow in fleet.journal.of("started"), "the slow one runs")
    frozen.pause()
    # On a busy machine the slow job may end before the pause, and jobs behind it may have begun.
    waiting = set(behind) - set(fleet.journal.of("started"))
    delivered = len(view.pending())

    async def handler(job: Job[Any]) -> None:
        fleet.journal.write("elsewhere", job.id)

    async with consuming(view.server.url, handler, **settings):
        await until(view.is_settled, "the other worker has run all")
    frozen.resume()
    last = view.add(0.01)
    await until(lambda: last in fleet.journal.of("started"), "it has dropped the jobs that waited in it")
    assert min(delivered, len(waiting)) > 2, "the test needs prefetched jobs"
    assert not waiting & set(fleet.journal.of("started")) & set(fleet.journal.of("elsewhere"))


async def test_entries_that_arrive_during_a_confirmation_are_confirmed_too(view: WorkerView) -> None:
    asked: list[list[bytes]] = []
    answer = asyncio.Event()

    class TakenOver(Client):
        """Reports each lease as taken over by another worker."""

        async def run(self, script: Any, keys: Any, args: Any, **options: Any) -> Any:
            *_, ids = args[:6], list(args[6:])
            asked.append(ids)
            await answer.wait()
            return ids

    settings, config = parse_url(view.server.url), ConsumerConfig(queue_name=QUEUE)
    client = TakenOver(settings, view.keys.tag.encode())
    queue: Any = None  # its jobs do not run
    inflight = InFlight(client, view.keys, config, lambda letter: None, None, Observers(), queue)
    inflight.receive(b"1-0", [b"d", encode_envelope("a", b"\xc0", 0)], 0)
    leases = Leases(client, view.keys, config, inflight)
    first = asyncio.create_task(leases.confirm())
    await until(lambda: asked, "the first confirmation is in flight")
    late = inflight.receive(b"2-0", [b"d", encode_envelope("b", b"\xc0", 0)], 0)
    others = [asyncio.create_task(leases.confirm()) for _ in range(3)]
    await asyncio.sleep(0)
    answer.set()
    await asyncio.gather(first, *others)
    assert asked == [[b"1-0"], [b"2-0"]]
    assert late is not None
    assert late.is_lost
    await client.close()


async def test_an_entry_that_arrives_after_its_lease_expired_is_not_started(view: WorkerView) -> None:
    """The delivery is delayed, as in the socket of a suspended process."""
    ran: list[tuple[str, str]] = []
    url = view.server.url

    def handler(where: str) -> Callable[[Job[Any]], Any]:
        async def handle(job: Job[Any]) -> None:
            ran.append((where, job.id))

        return handle

    settings = {"claim_min_idle_ms": CLAIM_MS, "delayed_enabled": False}
    async with Proxy(view.server.address) as proxy, consuming(proxy.url, handler("here"), **settings):
        reading = await reading_link(proxy)
        reading.replies_held = True
        stale = view.add()
        await until(view.pending, "it is held in the proxy")
        async with consuming(url, handler("elsewhere"), **settings):
            await until(view.is_settled, "the other worker has run it")
        reading.resume()
        last = view.add()
        await until(lambda: ("here", last) in ran, "the reader reads again")
    # Either worker may have taken it over, also the one it was delivered to: it ran once.
    assert [job_id for _, job_id in ran] == [stale, last]


async def test_running_jobs_run_once_through_an_outage_longer_than_leases(
    fresh_server: Callable[..., Server], fleet: Fleet
) -> None:
    server = fresh_server(appendonly="yes", appendfsync="always")
    view = WorkerView(server, QUEUE)
    settings = {"claim_min_idle_ms": 1000, "concurrency": 4}
    workers = [fleet.start(server.url, "sleeping", **settings) for _ in range(2)]
    ids = view.add_many([4.0] * 6)
    await until(lambda: len(fleet.journal.of("started")) == 6, "all run")
    server.kill()
    down_since = time.monotonic()
    await until(lambda: time.monotonic() - down_since > 1.5, "it is down for longer than a lease")
    server.start()
    view = WorkerView(server, QUEUE)
    await until(lambda: view.length() == 0, "all are done")
    assert Counter(fleet.journal.of("started")) == dict.fromkeys(ids, 1)
    for worker in workers:
        worker.stop()


async def test_a_machine_that_was_suspended_does_not_start_jobs_that_it_lost(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stands still while a machine sleeps; leases do not."""
    stuck = Stuck(only=0)
    async with consuming(view.server.url, stuck, claim_min_idle_ms=60_000, concurrency=1) as worker:
        first = view.add(0)
        await stuck.runs()
        view.add(1)
        (waiting,) = worker.take_in(view, 1)
        await worker._runtime._lease_thread.stop()
        view.client.xclaim(view.keys.stream, "default", "another", 0, [waiting])
        slept_ns = 120_000_000_000
        for module in (execute, admission, leases):
            monkeypatch.setattr(module, "boot_clock_ns", lambda: boot_clock_ns() + slept_ns)
        stuck.release.set()
        await until(lambda: worker.occupied == 0, "one is done and the other given up")
    assert stuck.started == [first]


def test_the_clock_of_leases_counts_the_time_in_which_the_machine_slept() -> None:
    assert abs(boot_clock_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) < 1_000_000_000
