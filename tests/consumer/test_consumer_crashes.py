"""Workers that die: their jobs run elsewhere, each as often as it may, and no innocent pays for a killer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from consumer.workers import consuming
from support.waiting import until
from tampu.engine.metrics import InMemorySink
from tampu.wire.envelope import decode_job
from tampu.wire.retry import JobRetryOverride

if TYPE_CHECKING:
    from consumer.views import WorkerView
    from consumer.workers import Fleet
    from tampu.wire.job import Job

CLAIM_MS = 300


@pytest.mark.servers
async def test_the_jobs_of_a_killed_worker_run_elsewhere_after_their_lease_and_none_is_lost(
    view: WorkerView, fleet: Fleet
) -> None:
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
    assert {attempt for _, attempt, _ in runs} == {1}, "the run that was cut short counts"
    assert min(after for _, _, after in runs) > CLAIM_MS * 0.6 / 1000
    assert sum(batch.reclaimed for batch in sink.reader_batches) == 3
    completed = [event for event in view.events() if event["e"] == "completed"]
    assert {event["attempt"] for event in completed} == {"2"}


@pytest.mark.servers
async def test_a_job_that_kills_its_process_is_a_dead_letter_after_its_attempts_and_fifty_others_complete(
    view: WorkerView, fleet: Fleet
) -> None:
    """Finding 15: exactly max_attempts runs. The worker is started again as often as it dies.

    Those that are done just before the killer starts must be settled before it does.
    """
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
    runs = [words[2] for words in fleet.journal.lines() if words[:2] == ["started", poison]]
    assert runs == ["0", "1", "2"], "exactly max_attempts runs, each told its number"
    (letter,) = view.dead_letters()
    assert (letter.reason, letter.name, letter.attempts) == ("retries_exhausted", "killer", 3)
    assert letter.error_type == "WorkerLost"
    assert decode_job(letter.payload).attempt == 3
    assert set(fleet.journal.of("done")) == set(innocent)
    completed = {event["id"] for event in view.events() if event["e"] == "completed"}
    assert completed == set(innocent)


@pytest.mark.servers("valkey", "redis86")
async def test_a_job_that_was_cut_short_and_then_fails_keeps_count(view: WorkerView, fleet: Fleet) -> None:
    """Finding 15: claims are not forgotten when a run then fails in order."""
    view.add(60.0, retry=JobRetryOverride(4))
    # Without a promoter: a dead one's lock would hold up the retries.
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS, delayed_enabled=False)
    await until(lambda: fleet.journal.of("started"), "it runs")
    victim.kill()
    attempts: list[int] = []

    async def handler(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        raise ValueError("in order")

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS):
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
    assert attempts == [1, 2, 3]
    assert letter.attempts == 4


async def test_suspects_run_one_at_a_time_while_new_jobs_go_on(view: WorkerView, fleet: Fleet) -> None:
    suspects = set(view.add_many([60.0] * 4))
    victim = fleet.start(view.server.url, "sleeping", claim_min_idle_ms=CLAIM_MS, concurrency=4)
    await until(lambda: len(fleet.journal.of("started")) == 4, "it runs four")
    victim.kill()
    running: set[str] = set()
    most_suspects = most = 0

    async def handler(job: Job[Any]) -> None:
        nonlocal most_suspects, most
        running.add(job.id)
        most_suspects = max(most_suspects, len(running & suspects))
        most = max(most, len(running))
        await asyncio.sleep(0.05)
        running.discard(job.id)

    async with consuming(view.server.url, handler, claim_min_idle_ms=CLAIM_MS, concurrency=4):
        await until(lambda: running & suspects, "the first suspect runs")
        view.add_many([0] * 30)
        await until(view.is_settled, "all are done")
    assert most_suspects == 1
    assert most == 4


async def test_a_full_worker_leaves_suspects_to_others(view: WorkerView, fleet: Fleet) -> None:
    """Claimed by a worker without a place for it, a job would wait there, kept by its lease, while others are idle."""
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
        await until(lambda: full, "it has no place left")
        idle_enough = 2 * CLAIM_MS
        await until(
            lambda: any(entry["time_since_delivered"] > idle_enough for entry in view.pending()),
            "nobody has claimed the orphan",
        )
        async with consuming(view.server.url, handler, **settings):
            await until(lambda: ran, "another worker runs it")
        release.set()
    assert ran == [orphan]
    assert orphan not in full


async def test_suspects_get_their_place_although_the_queue_is_never_empty(view: WorkerView, fleet: Fleet) -> None:
    """A worker that reads ahead is never without work: the reader leaves a place when one is wanted."""
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
