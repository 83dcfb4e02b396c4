"""Workers that die: other workers run their jobs, and only the job that killed them becomes a dead letter."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import consuming, reading_link
from support.proxy import Proxy
from support.waiting import until
from tampu.consume import takeover
from tampu.metrics import InMemorySink
from tampu.redis import calls
from tampu.redis.connection import Connection
from tampu.wire.envelope import decode_job
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from consume.views import WorkerView
    from consume.workers import Fleet
    from tampu.wire.job import Job

CLAIM_MS = 300


@pytest.mark.servers
async def test_a_killed_workers_jobs_run_elsewhere_once_their_leases_expire(view: WorkerView, fleet: Fleet) -> None:
    ids = view.add_many([60.0] * 3)
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS, concurrency=3, consumer_id="victim")
    await until(lambda: len(fleet.journal.of("started")) == 3, "it runs three")
    victim.kill()
    killed_at = time.monotonic()
    runs: list[tuple[str, int, float]] = []
    sink = InMemorySink()

    async def handler(job: Job[Any]) -> None:
        runs.append((job.id, job.attempt, time.monotonic() - killed_at))

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, metrics=sink):
        await until(view.is_settled, "all are done")
    assert sorted(job_id for job_id, _, _ in runs) == ids
    assert {attempt for _, attempt, _ in runs} == {0}, "the death of a worker uses up no attempt"
    assert min(after for _, _, after in runs) > CLAIM_MS * 0.6 / 1000
    assert sum(batch.reclaimed for batch in sink.reader_batches) == 3
    completed = [event for event in view.events() if event["e"] == "completed"]
    assert {event["attempt"] for event in completed} == {"1"}


@pytest.mark.servers
async def test_a_job_that_kills_its_workers_ends_as_a_dead_letter(view: WorkerView, fleet: Fleet) -> None:
    """It ends after its attempts plus at most three runs. The worker is restarted whenever it dies."""
    innocent = view.add_many([0.01] * 25)
    poison = view.add("poison", name="killer", job_id="poison")
    innocent += view.add_many([0.01] * 25)
    settings = {"claim_min_idle_ms": CLAIM_MS, "concurrency": 10, "max_attempts": 3}
    worker = fleet.start(view.server.url, "deadly", **settings)

    def is_done() -> bool:
        nonlocal worker
        if not worker.is_alive:
            worker = fleet.start(view.server.url, "deadly", **settings)
        return bool(view.dead_letters()) and view.is_settled()

    await until(is_done, "all are settled", 60)
    assert worker.stop() == 0
    assert fleet.journal.of("started").count(poison) == 6
    (letter,) = view.dead_letters()
    assert (letter.reason, letter.name, letter.attempts) == ("retries_exhausted", "killer", 6)
    assert letter.error_type == "WorkerLost"
    assert set(fleet.journal.of("done")) == set(innocent)
    completed = {event["id"] for event in view.events() if event["e"] == "completed"}
    assert completed == set(innocent)


@pytest.mark.servers
async def test_a_worker_that_dies_before_its_events_are_written_loses_no_job(view: WorkerView, fleet: Fleet) -> None:
    """A window is acknowledged first: its events may be lost, but its jobs neither are nor run again."""
    view.client.set(view.keys.events, "not a stream: the window ends with its acknowledgement")
    acknowledged, unfinished = view.add_many([0.0] * 20), view.add_many([60.0] * 2)
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS, concurrency=30)
    await until(lambda: view.length() == len(unfinished), "the others are acknowledged")
    victim.kill()
    view.client.delete(view.keys.events)
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS):
        await until(view.is_settled, "all are done")
    assert sorted(fleet.journal.of("done")) == sorted(acknowledged)
    assert sorted(runs) == sorted(unfinished)
    assert {event["id"] for event in view.events() if event["e"] == "completed"} == set(unfinished)
    assert view.dead_letters() == []


@pytest.mark.servers("valkey", "redis86")
async def test_a_job_whose_worker_died_keeps_all_its_attempts(view: WorkerView, fleet: Fleet) -> None:
    view.add(60.0, retry=JobRetryOverride(4))
    # Without a promoter: the lock of a dead one would delay the retries.
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS, delayed_enabled=False)
    await until(lambda: fleet.journal.of("started"), "it runs")
    victim.kill()
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        raise ValueError("in order")

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS):
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert attempts == [0, 1, 2, 3]
    assert letter.attempts == 4


@pytest.mark.parametrize(("deaths", "together"), [(1, 20), (2, 2), (3, 1), (5, 1)])
async def test_suspects_run_together_depending_on_their_worker_deaths(
    view: WorkerView, deaths: int, together: int
) -> None:
    suspects = set(view.add_many([0] * 20))
    leave_to_a_dead_worker(view, deaths)
    running: set[str] = set()
    most_suspects = most_fresh = 0

    async def handler(job: Job[Any]) -> None:
        nonlocal most_suspects, most_fresh
        running.add(job.id)
        most_suspects = max(most_suspects, len(running & suspects))
        most_fresh = max(most_fresh, len(running - suspects))
        await asyncio.sleep(0.1)
        running.discard(job.id)

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, concurrency=20):
        await until(lambda: running & suspects, "the first is taken over")
        view.add_many([0] * 60)
        await until(view.is_settled, "all are done", within_secs=30)
    assert most_suspects == together
    assert most_fresh > together or together == 20, "new jobs run beside them"


async def test_a_killed_workers_jobs_are_taken_over_in_parallel(view: WorkerView, fleet: Fleet) -> None:
    """One survivor finishes a hundred jobs of two seconds within the lease plus four seconds."""
    ids = view.add_many([2.0] * 100)
    settings = {"claim_min_idle_ms": 3000, "concurrency": 100, "batch": 100}
    victim = fleet.start(view.server.url, "sleeping", **settings)
    await until(lambda: len(fleet.journal.of("started")) == 100, "it runs all of them")
    fleet.start(view.server.url, "sleeping", **settings)
    victim.kill()
    killed_at = time.monotonic()
    await until(view.is_settled, "all are done", within_secs=30)
    assert time.monotonic() - killed_at < 3.0 + 4.0
    assert set(fleet.journal.of("done")) == set(ids)


async def test_the_jobs_of_one_dead_worker_go_to_one_survivor(view: WorkerView, fleet: Fleet) -> None:
    """A job that kills again must kill one worker only, not all that took over jobs."""
    settings = {"claim_min_idle_ms": 1000, "concurrency": 10, "batch": 10}
    view.add_many([1.0] * 9)
    view.add("poison")
    for _ in range(4):
        fleet.start(view.server.url, "deadly", **settings)
    deaths_at: list[float] = []

    def deaths() -> int:
        alive = sum(member.is_alive for member in fleet.members)
        while len(deaths_at) < len(fleet.members) - alive:
            deaths_at.append(time.monotonic())
        return len(deaths_at)

    await until(lambda: deaths() == 2, "the poison has killed the worker that took it over", within_secs=30)
    # The next takeover begins when a lease has expired: until then no other worker may die.
    await asyncio.sleep(0.5)
    assert deaths() == 2


def leave_to_a_dead_worker(view: WorkerView, deaths: int) -> None:
    """Let a worker that no longer exists hold all waiting jobs, after this many worker deaths."""
    view.client.xgroup_create(view.keys.stream, "default", "0")
    [[_, entries]] = view.client.xreadgroup("default", "dead", {view.keys.stream: ">"})
    ids = [entry_id for entry_id, _ in entries]
    view.client.xclaim(view.keys.stream, "default", "dead", 0, ids, retrycount=deaths)


async def test_a_suspect_that_runs_for_long_lets_the_next_one_start(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has not killed its worker within a minute is an ordinary job."""
    monkeypatch.setattr(takeover, "QUARANTINE_SECS", 1.0)
    view.add_many([0, 0])
    leave_to_a_dead_worker(view, deaths=3)
    started_at: list[float] = []
    release = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        started_at.append(time.monotonic())
        await release.wait()

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, concurrency=10):
        await until(lambda: len(started_at) == 2, "the second runs beside the first")
        release.set()
        await until(view.is_settled, "both are done")
    assert started_at[1] - started_at[0] > 0.8, "until then the first ran alone"


async def test_a_slow_survivor_has_a_dead_workers_jobs_to_itself_for_a_while_only(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 10 s it is unlikely to die of them, so other workers take the rest."""
    monkeypatch.setattr(takeover, "EXCLUSIVE_MS", 1500)
    view.add_many([0, 0])
    leave_to_a_dead_worker(view, deaths=1)
    started_at: dict[str, float] = {}
    release = asyncio.Event()

    async def slow(job: Job[Any]) -> None:
        started_at["slow"] = time.monotonic()
        await release.wait()

    async def idle(job: Job[Any]) -> None:
        started_at["idle"] = time.monotonic()

    settings = {"claim_min_idle_ms": CLAIM_MS, "concurrency": 1}
    async with consuming(view.server.url, slow, **settings):
        await until(lambda: started_at, "it takes over the first")
        async with consuming(view.server.url, idle, **settings):
            await until(lambda: len(started_at) == 2, "the other worker takes over the second")
            release.set()
            await until(view.is_settled, "both are done")
    # The record of who takes over expires after ten times as long.
    assert 1.2 < started_at["idle"] - started_at["slow"] < 10


async def test_a_full_worker_leaves_suspects_to_others(view: WorkerView, fleet: Fleet) -> None:
    """A job taken over without a free slot would wait under a renewed lease while other workers are idle."""
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS)
    orphan = view.add(60.0)
    await until(lambda: fleet.journal.of("started"), "it runs")
    victim.kill()
    release = asyncio.Event()
    full: list[str] = []
    ran: list[str] = []

    async def keeps_busy(job: Job[Any]) -> None:
        full.append(job.id)
        await release.wait()

    async def handler(job: Job[Any]) -> None:
        ran.append(job.id)

    settings = {"claim_min_idle_ms": CLAIM_MS, "concurrency": 1}
    async with consuming(view.server.url, keeps_busy, consumer_id="full", **settings):
        view.add()
        await until(lambda: full, "it has no free slot")
        idle_enough = 2 * CLAIM_MS
        await until(
            lambda: any(entry["time_since_delivered"] > idle_enough for entry in view.pending()),
            "no worker has claimed the orphan",
        )
        async with consuming(view.server.url, handler, **settings):
            await until(lambda: ran, "another worker runs it")
        release.set()
    assert ran == [orphan]
    assert orphan not in full


async def test_suspects_get_a_slot_although_the_queue_is_never_empty(view: WorkerView, fleet: Fleet) -> None:
    """A worker that reads ahead always has work: the reader leaves a free slot for a suspect."""
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS)
    orphan = view.add(60.0)
    await until(lambda: fleet.journal.of("started"), "it runs")
    victim.kill()
    ran: Counter[str] = Counter()

    async def handler(job: Job[Any]) -> None:
        ran[job.id] += 1
        await asyncio.sleep(0.002)
        if orphan not in ran:
            view.add()

    view.add_many([0] * 200)
    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, concurrency=1):
        await until(lambda: orphan in ran, "the orphan ran")
        assert view.length() > 100, "the test needs a full queue"
        await until(view.is_settled, "all are done")
    assert ran[orphan] == 1


# --- jobs that only waited in a worker that died


@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
async def test_a_job_that_never_started_is_not_dead_lettered_with_its_killer(
    view: WorkerView, fleet: Fleet, uvloop: bool
) -> None:
    """With one attempt each, deliveries must not count as runs."""
    view.add("poison", retry=JobRetryOverride(1))
    neighbours = [view.add(0.05, retry=JobRetryOverride(1)) for _ in range(99)]
    fleet.start(view.server.url, "deadly", concurrency=10, batch=64, uvloop=uvloop)
    await until(lambda: not fleet.members[0].is_alive, "the poison has killed the worker")
    fleet.start(view.server.url, "deadly", concurrency=10, batch=64, uvloop=uvloop)
    await until(view.is_settled, "all are settled", within_secs=60)
    started, done = Counter(fleet.journal.of("started")), set(fleet.journal.of("done"))
    dead = {decode_job(letter.payload).id for letter in view.dead_letters()}
    assert dead == set(started) - done, "only the job that began and did not end"
    assert set(neighbours) <= dead | done
    assert max(started.values()) == 1
    assert fleet.members[1].is_alive


async def test_a_read_that_arrives_late_costs_no_attempt(view: WorkerView) -> None:
    """The server may execute a read whose connection was given up: its entries are pending for a live worker."""
    runs: list[int] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.attempt)

    def is_blocked() -> bool:
        return bool(view.client.info("clients")["blocked_clients"])

    async with (
        Proxy(view.server.address) as proxy,
        consuming(proxy.url, handler, block_ms=200, claim_min_idle_ms=6000, concurrency=1),
    ):
        reading = await reading_link(proxy)
        reading.requests_held = True
        await until(lambda: reading._early, "the next read is held in the proxy")
        reading.strand()
        await until(is_blocked, "it has reconnected and reads again")
        view.client.set(view.keys.paused, "1")
        await until(lambda: not is_blocked(), "it has stopped reading")
        view.add(1)
        reading.deliver()
        await until(view.pending, "the late read has taken the job")
        view.client.delete(view.keys.paused)
        await until(view.is_settled, "it has run", within_secs=30)
    assert runs == [0]


async def test_nothing_runs_between_the_mark_of_a_last_attempt_and_its_handler(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that killed the worker just then would make a dead letter of a job that had not begun."""
    marked: list[bytes] = []
    begun: list[str] = []
    marks_seen_too_early: list[int] = []
    request_now = Connection.request_now

    def counted(self: Connection, packed: bytes, on_reply: Any) -> bool:
        has_left = request_now(self, packed, on_reply)
        if has_left:
            marked.append(packed)
        return has_left

    async def handler(job: Job[Any]) -> None:
        if job.payload == "watch":
            while len(begun) < 20:
                if len(marked) != len(begun):
                    marks_seen_too_early.append(len(marked))
                await asyncio.sleep(0)
        else:
            begun.append(job.id)

    monkeypatch.setattr(Connection, "request_now", counted)
    view.add("watch", retry=JobRetryOverride(2))
    view.add_many([0] * 20)
    async with consuming(view.server.url, handler, max_attempts=1):
        await until(view.is_settled, "all are done")
    assert len(marked) == 20
    assert marks_seen_too_early == []


async def test_what_a_takeover_has_found_meanwhile_is_not_handed_back(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover, acknowledged entries are pending again in the name of the worker that had run them."""
    hand_back = calls.hand_back
    view.client.set(view.keys.paused, "1")
    view.add(0)

    async def handler(job: Job[Any]) -> None:
        pass

    async with consuming(view.server.url, handler, claim_min_idle_ms=60_000) as worker:
        await until(
            lambda: view.client.exists(view.keys.stream) and view.client.xinfo_groups(view.keys.stream), "ready"
        )
        name = worker.config.consumer_id
        [[_, [(entry_id, _)]]] = view.client.xreadgroup("default", name, {view.keys.stream: ">"})

        async def hand_back_late(*args: Any, **settings: Any) -> None:
            view.client.xclaim(view.keys.stream, "default", name, 0, [entry_id])  # as a takeover does
            await hand_back(*args, **settings)

        monkeypatch.setattr(calls, "hand_back", hand_back_late)
        await worker.queue.inflight.hand_back_undelivered(time.monotonic() - 10)
        assert [one for one, _ in view.entries()] == [entry_id]


async def test_a_last_attempt_that_waited_too_long_checks_its_lease_again(view: WorkerView) -> None:
    """A worker that stands still between the answer and the turn may have lost the entry meanwhile."""
    started: list[str] = []

    async def handler(job: Job[Any]) -> None:
        started.append(job.id)

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, max_attempts=1) as worker:
        await until(lambda: view.client.exists(view.keys.stream), "it has made its group")
        turn = worker.queue.admission._starts._turn
        await turn.acquire()
        view.add(0)
        await until(lambda: turn._waiters, "the job is known to be ours and waits for its turn")
        await worker.stop_renewing()
        (pending,) = view.pending()
        view.client.xclaim(view.keys.stream, "default", "another", 0, [pending["message_id"]])
        lease_ends_at = time.monotonic() + CLAIM_MS / 1000
        await until(lambda: time.monotonic() > lease_ends_at, "the lease has run out")
        turn.release()
        await until(lambda: worker.occupied == 0, "it is given up")
    assert started == []


async def test_a_dead_letter_counts_runs_and_not_deliveries(view: WorkerView) -> None:
    """The job waited in a worker that died, then ran once, in a worker that it killed."""

    async def handler(job: Job[Any]) -> None:
        pass

    view.add()
    view.client.xgroup_create(view.keys.stream, "default", "0")
    [[_, [(entry_id, _)]]] = view.client.xreadgroup("default", "killed", {view.keys.stream: ">"})
    times = {"idle": 60_000, "retrycount": calls.START_MARK + 2, "justid": True}
    view.client.xclaim(view.keys.stream, "default", "killed", 0, [entry_id], **times)
    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, max_attempts=1):
        [letter] = await until(view.dead_letters, "it is dead-lettered")
    assert (letter.error_type, letter.attempts) == ("WorkerLost", 1)
