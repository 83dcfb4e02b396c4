"""Faults of ChasquiMQ that lose jobs, findings 1 to 12: tampu does not have them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from support.delayed import delay, member_of
from support.parts import consuming, running
from support.producers import open_producer
from support.queues import QueueView
from support.repeating import fired, make_due, next_fire, register, repeat_keys, write_spec
from support.waiting import until
from tampu import (
    AddOptions,
    BackoffSpec,
    Job,
    JobRetryOverride,
    QueueFullError,
    RepeatableSpec,
    RepeatPattern,
    Scheduler,
    SchedulerConfig,
)
from tampu.maintain.scheduler import fire_id
from tampu.wire.repeat import StoredSpec

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles

#: A job with two attempts, the second one at once.
TWICE = JobRetryOverride(2, BackoffSpec.fixed(1, jitter_ms=0))


def scheduler(server: Server | Cluster, **config: Any) -> Scheduler:
    return Scheduler(server.url, SchedulerConfig(**{"queue_name": "q", "tick_interval_ms": 20} | config))


async def ignore(job: Job[Any]) -> None:
    """Do nothing."""


async def fail(job: Job[Any]) -> None:
    raise ValueError("on purpose")


@pytest.mark.servers
async def test_finding_01_a_full_queue_refuses_instead_of_trimming(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    ran: list[int] = []

    async def note(job: Job[int]) -> None:
        ran.append(job.payload)

    async with open_producer(server.url, max_stream_len=50) as producer:
        with pytest.raises(QueueFullError) as refused:
            await producer.add_bulk([*range(1000)])
        assert len(refused.value.accepted) == view.length() == 50
        async with consuming(server.url, note, queue_name="q"):
            await until(lambda: view.length() == 0, "all are done")
    assert sorted(ran) == [*range(50)]


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_finding_02_entries_deleted_under_a_worker_leave_the_pending_list(server: Server) -> None:
    view = QueueView(server, "q")
    stream = view.keys.stream
    async with open_producer(server.url) as producer:
        await producer.add_bulk([1, 2, 3])
        view.client.xgroup_create(stream, "default", "0")
        view.client.xreadgroup("default", "dead", {stream: ">"})
        view.client.xdel(stream, view.entries()[1][0])
        async with consuming(server.url, ignore, queue_name="q", claim_min_idle_ms=100):
            await until(lambda: view.client.xpending(stream, "default")["pending"] == 0, "nothing is pending")


@pytest.mark.slow
@pytest.mark.servers("valkey", "redis86")
async def test_finding_03_an_interval_shorter_than_the_tick_fires(server: Server) -> None:
    view = QueueView(server, "q")
    await register(view, RepeatPattern.every(100))
    async with running(scheduler(server, tick_interval_ms=1000)):
        began = await until(lambda: view.length() and view.now_ms(), "it fires")
        await until(lambda: view.length() >= 11, "it fires repeatedly")
        # Ten intervals of 100 ms and not ten ticks of 1000 ms.
        assert view.now_ms() - began < 5000
        # Also when the scheduler is late.
        late = await register(view, RepeatPattern.every(60_000), "late")
        due = view.now_ms() - 150_000
        make_due(view, late, due)
        await until(lambda: fired(view, late), "it fires")
    assert fire_id(late, due + 120_000) in view.ids()


@pytest.mark.servers
async def test_finding_04_the_last_occurrence_of_a_cron_is_fired(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    due = datetime.fromtimestamp(view.now_ms() // 1000 - 3600, UTC)
    pattern = RepeatPattern.cron(due.strftime("%S %M %H %d %m * %Y"))
    due_ms = int(due.timestamp()) * 1000
    write_spec(view, StoredSpec(key="once", job_name="n", pattern=pattern, payload_slot=b"\xc4\x01\x07"), due_ms)
    async with running(scheduler(server)):
        await until(view.length, "it is fired, although an hour late")
    assert view.ids() == [fire_id("once", due_ms)]
    assert repeat_keys(view) == set()  # and nothing is left behind


@pytest.mark.servers
async def test_finding_05_registering_again_starts_a_new_count(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    key = await register(view, RepeatPattern.every(3_600_000), limit=10)
    view.client.hset(view.keys.repeat_spec(key), "fired", 4)
    await register(view, RepeatPattern.every(3_600_000), limit=2)
    make_due(view, key, view.now_ms() - 1)
    async with running(scheduler(server)):
        await until(view.length, "it fires")
    assert fired(view, key) == 1


@pytest.mark.servers("valkey", "redis86")
async def test_finding_06_a_job_registered_at_every_start_still_fires(server: Server) -> None:
    view = QueueView(server, "q")
    spec = RepeatableSpec("tick", RepeatPattern.every(400), None)
    async with open_producer(server.url) as producer, running(scheduler(server)):
        key = await producer.ensure_repeatable(spec)
        first = next_fire(view, key)

        async def deploy_again() -> int:
            await producer.ensure_repeatable(spec)
            return view.length()

        await until(deploy_again, "it fires although it is registered repeatedly", within_secs=5)
    assert view.ids()[0] == fire_id(key, first or 0)


@pytest.mark.servers
async def test_finding_07_dead_letters_keep_all_fields(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    view.client.xadd(view.keys.stream, {"x": b"\xff\x00", "n": "mail", "trace": "abc"})
    view.client.xadd(view.keys.stream, {"d": b"\xc1 no envelope", "n": "print"})
    async with open_producer(server.url) as producer:
        async with consuming(server.url, ignore, queue_name="q"):
            await until(lambda: len(view.dead_letters()) == 2, "both are dead letters")
        letters = {letter.reason: letter for letter in await producer.peek_dlq()}
    malformed, undecodable = letters["malformed"], letters["decode_failed"]
    assert malformed.original == ((b"x", b"\xff\x00"), (b"n", b"mail"), (b"trace", b"abc"))
    assert malformed.name == "mail"
    assert (undecodable.payload, undecodable.name) == (b"\xc1 no envelope", "print")


@pytest.mark.servers
@pytest.mark.parametrize("key", ["dlq", "delayed"])
async def test_finding_08_an_outcome_that_cannot_be_written_keeps_the_job(
    server: Server | Cluster, key: str, troubles: Troubles
) -> None:
    view = QueueView(server, "q")
    view.client.set(getattr(view.keys, key), "of a wrong type")
    async with open_producer(server.url) as producer:
        retry = TWICE if key == "delayed" else JobRetryOverride(1)
        job_id = await producer.add_with_options(1, AddOptions(retry=retry))
        async with consuming(server.url, fail, queue_name="q", delayed_enabled=False):
            await until(lambda: troubles, "it could not be written")
            assert view.ids() == [job_id]
            view.client.delete(getattr(view.keys, key))
            await until(lambda: view.length() == 0, "it is written once possible")
    assert len(view.dead_letters() if key == "dlq" else view.delayed()) == 1


@pytest.mark.slow
@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_finding_09_neither_poison_nor_oom_stops_promoter_or_scheduler(
    server: Server, troubles: Troubles
) -> None:
    view = QueueView(server, "q")
    ran: Counter[str] = Counter()

    async def once_failing(job: Job[Any]) -> None:
        ran[job.name] += 1
        if job.name == "retried" and job.attempt == 0:
            raise ValueError("on purpose")

    async with (
        open_producer(server.url) as producer,
        consuming(server.url, once_failing, queue_name="q", scheduler=SchedulerConfig(tick_interval_ms=20)),
    ):
        delay(view, b"ab")
        view.client.hset(view.keys.repeat_spec("bad"), "spec", b"\xc1")
        make_due(view, "bad", 1)
        await until(lambda: view.dead_letters() and next_fire(view, "bad") is None, "the unreadable member is gone")
        # Make the promoter's own calls fail for a while: without memory they still work.
        view.client.set(view.keys.delayed, "of a wrong type")
        await until(lambda: troubles.about('promoter of queue "q" failed; retrying'), "the promoter is refused")
        view.client.delete(view.keys.delayed)
        await producer.upsert_repeatable(RepeatableSpec("repeated", RepeatPattern.every(300), None))
        delay(view, member_of("due", "delayed"), view.now_ms() + 300)
        server.config_set(maxmemory=1, maxmemory_policy="noeviction")
        await until(lambda: ran["delayed"], "due jobs run without memory")
        await until(lambda: troubles.about("OOM"), "fires are refused")
        server.config_set(maxmemory=0)
        delay(view, member_of("again", "delayed"))
        await producer.add_with_options(1, AddOptions(name="retried", retry=TWICE))
        await until(lambda: ran["delayed"] == 2, "delayed jobs run")
        await until(lambda: ran["retried"] == 2, "retries run")
        await until(lambda: ran["repeated"] >= 2, "repeatables fire")


@pytest.mark.servers
@pytest.mark.parametrize("disaster", ["flush", "delete"])
async def test_finding_10_a_deleted_group_is_created_again(server: Server | Cluster, disaster: str) -> None:
    view = QueueView(server, "q")
    ran: list[str] = []

    async def note(job: Job[Any]) -> None:
        ran.append(job.id)

    async with (
        open_producer(server.url) as producer,
        consuming(server.url, note, queue_name="q", block_ms=200),
    ):
        await producer.add(1)
        await until(lambda: len(ran) == 1, "it works")
        if disaster == "flush":
            view.client.flushall()
        else:
            view.client.delete(view.keys.stream)
        after = await producer.add(2)
        await until(lambda: ran[1:] == [after], "it works again")


@pytest.mark.slow
@pytest.mark.servers
async def test_finding_11_an_add_that_was_a_duplicate_says_so(server: Server | Cluster) -> None:
    view = QueueView(server, "q")
    ran: list[str] = []

    async def note(job: Job[Any]) -> None:
        ran.append(job.id)

    async with (
        open_producer(server.url, dedup_ttl_secs=1) as producer,
        consuming(server.url, note, queue_name="q"),
    ):
        assert (await producer.add_with_id("mine", 1)).is_new
        await until(lambda: ran == ["mine"] and view.length() == 0, "it is done")
        again = await producer.add_with_id("mine", 2)
        assert (again, again.is_new) == ("mine", False)

        async def is_taken_again() -> bool:
            return (await producer.add_with_id("mine", 3)).is_new

        await until(is_taken_again, "after dedup_ttl_secs the id is free again")
        await until(lambda: ran == ["mine", "mine"], "and its job runs")


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_finding_12_a_worker_started_without_memory_recovers(server: Server, troubles: Troubles) -> None:
    ran: list[str] = []

    async def note(job: Job[Any]) -> None:
        ran.append(job.id)

    async with open_producer(server.url) as producer:
        job_id = await producer.add(1)
        server.config_set(maxmemory=1, maxmemory_policy="noeviction")
        async with consuming(server.url, note, queue_name="q"):
            await until(lambda: troubles.about("OOM"), "it was refused")
            server.config_set(maxmemory=0)
            await until(lambda: ran == [job_id], "it works")
