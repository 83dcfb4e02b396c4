"""Several queues in one worker: fair shares, queues added later, and queues that cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from consume.views import WorkerView
from support.users import acl_user
from support.waiting import until
from tampu import ConfigError, Queue, Worker, current_job
from tampu.metrics import MetricsSink, QueueDepth
from tampu.wire.heartbeat import QueueShare, decode_heartbeat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.cluster import Cluster
    from servers.process import Server
    from support.troubles import Troubles


class Shop:
    """Queues of one server whose jobs note their queue, run for `secs` and may be held."""

    def __init__(self, server: Server | Cluster, *names: str, secs: float = 0.0, url: str | None = None) -> None:
        self.server = server
        self.url = url or server.url
        self.secs = secs
        self.started: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.release = asyncio.Event()
        self.release.set()
        self.views = {name: WorkerView(server, name) for name in names}
        self.queues = [self.queue(name) for name in names]

    def queue(self, name: str) -> Queue:
        queue = Queue(name, url=self.url)

        @queue.task(name="note")
        async def note() -> None:
            assert current_job().name == "note"
            self.started[name] += 1
            self.running[name] += 1
            self.most[name] = max(self.most[name], self.running[name])
            await self.release.wait()
            if self.secs:
                await asyncio.sleep(self.secs)
            self.running[name] -= 1

        return queue

    def add(self, name: str, count: int = 1) -> None:
        view = self.views.setdefault(name, WorkerView(self.server, name))
        pipeline = view.client.pipeline(transaction=False)
        for number in range(count):
            pipeline.execute_command("XADD", view.keys.stream, "*", *_fields(f"{name}-{time.monotonic_ns()}-{number}"))
        pipeline.execute()

    async def has_run(self, name: str, times: int, within_secs: float = 20) -> None:
        await until(lambda: self.started[name] == times, f"{name} has started {times} jobs", within_secs)

    @contextlib.asynccontextmanager
    async def working(self, **settings: Any) -> AsyncIterator[Worker]:
        defaults: dict[str, Any] = {"shutdown_deadline_secs": 5, "claim_min_idle_ms": 2000}
        async with Worker(self.queues, **(defaults | settings)) as worker:
            yield worker


def _fields(job_id: str) -> list[bytes]:
    from tampu.wire.entry import job_fields
    from tampu.wire.envelope import encode_job
    from tampu.wire.job import Job

    return job_fields(encode_job(Job(job_id, "note", {}, 0, 1_700_000_000_000)), "note")


# --- shares


@pytest.mark.parametrize(("concurrency", "jobs"), [(1, 1200), (20, 8000)])
async def test_weights_are_honoured(server: Server, concurrency: int, jobs: int) -> None:
    weights = {"high": 6, "middle": 3, "low": 1}
    shop = Shop(server, *weights, secs=0.001)
    for name in weights:
        shop.add(name, jobs)
    async with shop.working(concurrency=concurrency, weights=weights, events_enabled=False):
        await until(lambda: shop.started["high"] >= 0.9 * jobs, "many have run", 60)
        got = dict(shop.started)
    total = sum(got.values())
    assert {name: got[name] / total for name in weights} == pytest.approx(
        {name: weight / 10 for name, weight in weights.items()}, rel=0.1
    )


async def test_a_flooded_queue_does_not_starve_another(server: Server) -> None:
    shop = Shop(server, "flooded", "quiet", secs=0.005)
    shop.add("flooded", 5000)
    async with shop.working(concurrency=1, events_enabled=False):
        await until(lambda: shop.started["flooded"] > 50, "it is busy")
        for number in range(5):
            added_at = time.monotonic()
            shop.add("quiet")
            await shop.has_run("quiet", number + 1)
            assert time.monotonic() - added_at < 2


async def test_reserved_places_stay_free_for_their_queue(server: Server) -> None:
    shop = Shop(server, "critical", "bulk")
    shop.release.clear()
    shop.add("bulk", 20)
    async with shop.working(concurrency=4, reserve={"critical": 2}):
        await until(lambda: shop.started["bulk"] == 2, "bulk has the other slots")
        shop.add("critical", 2)
        await until(lambda: shop.started["critical"] == 2, "they start at once")
        assert shop.started["bulk"] == 2
        shop.release.set()
        await until(lambda: shop.started["bulk"] == 20, "all run")
    assert shop.most["bulk"] == 2


async def test_a_queue_runs_no_more_jobs_than_its_limit(server: Server) -> None:
    shop = Shop(server, "bulk", "other", secs=0.002)
    shop.add("bulk", 60)
    shop.add("other", 60)
    async with shop.working(concurrency=10, limit={"bulk": 3}):
        await until(lambda: shop.started.total() == 120, "all have run")
    assert shop.most["bulk"] == 3
    assert shop.most["other"] > 3


async def test_concurrency_is_shared_by_all_queues(server: Server) -> None:
    shop = Shop(server, "a", "b", "c", secs=0.001)
    for name in "abc":
        shop.add(name, 50)
    most = 0
    async with shop.working(concurrency=4):
        while shop.started.total() < 150:
            most = max(most, shop.running.total())
            await asyncio.sleep(0)
    assert most == 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weights": {"x": 1}}, "weights names 'x', but the worker serves no such queue"),
        ({"weights": {"a": 0}}, r"weights\['a'\]"),
        ({"limit": {"a": 0}}, r"limit\['a'\]"),
        ({"reserve": {"a": -1}}, r"reserve\['a'\]"),
        ({"reserve": {"a": 10}}, "leaves none for the other queues"),
        ({"reserve": {"a": 3}, "limit": {"a": 2}}, "more than the slots it may have"),
        ({"weights": ["a"]}, "weights"),
    ],
)
def test_impossible_shares_are_refused(settings: dict[str, Any], text: str) -> None:
    queues = [Queue(name, url="redis://127.0.0.1:1") for name in "ab"]
    with pytest.raises(ConfigError, match=text):
        Worker(queues, lambda job: None, concurrency=10, **settings)


async def test_shares_are_visible_from_outside(server: Server) -> None:
    shop = Shop(server, "critical", "bulk")
    shop.release.clear()
    shop.add("bulk", 5)
    view = shop.views["bulk"]
    shares: dict[str, Any] = {"weights": {"bulk": 3}, "reserve": {"critical": 2}, "limit": {"bulk": 4}}
    async with shop.working(concurrency=10, **shares) as worker:
        await shop.has_run("bulk", 4)
        assert worker.slots_used == {"critical": 0, "bulk": 4}
        # The lease thread and the leaders may still be connecting.
        await until(lambda: worker.connections == len(view.connections()), "all connections are counted")

        def beat() -> QueueShare | None:
            packed = view.client.get(view.keys.heartbeat("default", view.consumers()[0]))
            found = decode_heartbeat(packed)
            return None if found is None or found.share is None or not found.share.used else found.share

        share = await until(beat, "the heartbeat has them")
        shop.release.set()
    assert share == QueueShare(queues=2, used_by_all=4, used=4, weight=3, reserve=0, limit=4)
    assert (worker.connections, worker.slots_used) == (0, {})


# --- queues that come and go


@pytest.mark.servers("valkey", "redis62", "cluster86")
async def test_a_queue_can_be_added_to_a_running_worker(server: Server | Cluster) -> None:
    shop = Shop(server, "first")
    async with shop.working(read_block_ms=60_000) as worker:  # a read that waits must not hold it up
        shop.add("first")
        await until(lambda: shop.started["first"] == 1, "it works")
        shop.add("second")
        worker.add_queue(shop.queue("second"))
        await until(lambda: shop.started["second"] == 1, "the new queue is served")
        shop.add("second")
        shop.add("first")
        await until(lambda: shop.started == {"first": 2, "second": 2}, "both are served")
        assert worker.name == "first,second"
        with pytest.raises(ConfigError, match="'second' is given twice"):
            worker.add_queue(shop.queue("second"))
    assert shop.views["second"].is_settled()


async def test_a_paused_queue_does_not_hold_up_the_others(server: Server) -> None:
    shop = Shop(server, "paused", "other")
    view = shop.views["paused"]
    view.client.set(view.keys.paused, "1")
    shop.add("paused")
    async with shop.working(read_block_ms=60_000):
        for number in range(3):
            shop.add("other")
            await shop.has_run("other", number + 1, within_secs=2)
        assert shop.started["paused"] == 0
        view.client.delete(view.keys.paused)
        await until(lambda: shop.started["paused"] == 1, "it runs when it is resumed")


# --- queues that cannot be read


@pytest.mark.servers
async def test_a_stream_of_the_wrong_type_does_not_stop_the_others(
    server: Server | Cluster, troubles: Troubles
) -> None:
    shop = Shop(server, "bad", "good")
    view = shop.views["bad"]
    view.client.set(view.keys.stream, "of a wrong type")
    async with shop.working():
        for number in range(3):
            shop.add("good")
            await shop.has_run("good", number + 1, within_secs=3)
        assert len(troubles.about("WRONGTYPE")) == 1
        view.client.delete(view.keys.stream)
        shop.add("bad")
        await until(lambda: shop.started["bad"] == 1, "it runs once it is a stream")


@pytest.mark.servers
async def test_a_stream_that_turns_into_another_type_does_not_stop_the_others(
    server: Server | Cluster, troubles: Troubles
) -> None:
    shop = Shop(server, "bad", "good")
    view = shop.views["bad"]
    async with shop.working():
        shop.add("bad")
        await until(lambda: shop.started["bad"] == 1, "it works")
        view.client.set(view.keys.stream, "of a wrong type")
        for number in range(3):
            shop.add("good")
            await shop.has_run("good", number + 1, within_secs=3)
        await until(lambda: troubles.about("WRONGTYPE"), "it is logged")
        view.client.delete(view.keys.stream)
        shop.add("bad")
        await until(lambda: shop.started["bad"] == 2, "it runs once it is a stream again")


async def test_a_queue_that_cannot_be_measured_does_not_hide_the_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tampu.consume.link.MEASURE_SECS", 0.05)
    depths: Counter[str] = Counter()

    class Depths(MetricsSink):
        def __init__(self, queue: str = "") -> None:
            self.queue = queue

        def for_queue(self, queue: str) -> Depths:
            return Depths(queue)

        def queue_depth(self, depth: QueueDepth) -> None:
            depths[self.queue] += 1

    shop = Shop(server, "bad", "good")
    view = shop.views["bad"]
    view.client.set(view.keys.delayed, "of a wrong type")
    async with shop.working(delayed_enabled=False, metrics=Depths()):
        await until(lambda: depths["good"] > 1, "it is measured")
        assert depths["bad"] == 0
        view.client.delete(view.keys.delayed)
        await until(lambda: depths["bad"] > 1, "so is the other one, once it can be")


async def test_a_refused_check_for_paused_tasks_is_logged_once_and_recovers(
    server: Server, troubles: Troubles, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(server, "bad")
    view = shop.views["bad"]
    view.client.set(view.keys.paused_tasks, "of a wrong type")
    view.client.zadd(view.keys.cancel_marks, {"some-job": time.time() * 1000})
    with caplog.at_level("INFO", logger="tampu.worker"):
        async with shop.working():
            await until(lambda: troubles.about("WRONGTYPE"), "it is logged")
            looks = view.client.info("commandstats")["cmdstat_hgetall"]["calls"]
            await until(
                lambda: view.client.info("commandstats")["cmdstat_hgetall"]["calls"] > looks + 2, "it is tried again"
            )
            assert len(troubles.about("WRONGTYPE")) == 1
            view.client.delete(view.keys.paused_tasks)
            await until(lambda: 'pauses and cancels of queue "bad" recovered' in caplog.text, "it recovers")


@pytest.mark.servers("valkey", "redis62", "cluster86")
@pytest.mark.parametrize("key", ["dlq", "delayed"])
async def test_failures_that_cannot_be_written_do_not_stop_the_others(server: Server | Cluster, key: str) -> None:
    shop = Shop(server, "bad", "good")
    view = shop.views["bad"]
    view.client.set(getattr(view.keys, key), "of a wrong type")
    bad = shop.queues[0]

    @bad.task(name="fails", attempts=1 if key == "dlq" else 2, backoff=timedelta(milliseconds=60))
    async def fails() -> None:
        shop.started["fails"] += 1
        raise ValueError

    for _ in range(150):
        await fails.add()
    async with shop.working(concurrency=2, delayed_enabled=False):
        await until(lambda: shop.started["fails"] == 150, "more have failed than may wait to be written")
        for number in range(3):
            shop.add("good")
            await shop.has_run("good", number + 1, within_secs=3)
        view.client.delete(getattr(view.keys, key))
        written = view.dead_letters if key == "dlq" else view.delayed
        await until(lambda: len(written()) == 150, "they are written once the key is removed")
    await bad.close()


@pytest.mark.servers
async def test_a_missing_group_is_created_again_and_does_not_stop_the_others(server: Server | Cluster) -> None:
    shop = Shop(server, "bad", "good")
    view = shop.views["bad"]
    async with shop.working():
        shop.add("bad")
        await until(lambda: shop.started["bad"] == 1 and not view.pending(), "it works")
        view.client.xgroup_destroy(view.keys.stream, "default")
        for number in range(3):
            shop.add("good")
            await shop.has_run("good", number + 1, within_secs=3)
        shop.add("bad")
        await until(lambda: shop.started["bad"] == 2, "so does the other one")


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_an_acl_that_forbids_one_queue_does_not_stop_the_others(server: Server, troubles: Troubles) -> None:
    with acl_user(server, "half", "pw", "~{chasqui:good}*", "~{chasqui:fine}*", "+@all"):
        shop = Shop(server, "bad", "good", "fine", url=server.url.replace("redis://", "redis://half:pw@"))
        async with shop.working():
            for number in range(3):
                shop.add("good")
                shop.add("fine")
                await shop.has_run("good", number + 1, within_secs=3)
                await shop.has_run("fine", number + 1, within_secs=3)
            assert troubles.about("NOPERM")
            shop.add("bad")
            server.client().execute_command("ACL", "SETUSER", "half", "~{chasqui:bad}*")
            await until(lambda: shop.started["bad"] == 1, "it runs once it is allowed")


@pytest.mark.parametrize(("deaths", "together"), [(2, 2), (3, 1)])
async def test_suspects_of_two_queues_do_not_run_together(server: Server, deaths: int, together: int) -> None:
    names = ("a", "b", "fresh")
    shop = Shop(server, *names, secs=0.05)
    for name in names[:2]:
        view = shop.views[name]
        shop.add(name, 5)
        view.client.xgroup_create(view.keys.stream, "default", "0")
        [[_, entries]] = view.client.xreadgroup("default", "dead", {view.keys.stream: ">"})
        ids = [entry_id for entry_id, _ in entries]
        view.client.xclaim(view.keys.stream, "default", "dead", 0, ids, retrycount=deaths)
    most = most_beside = 0

    async def watch() -> None:
        nonlocal most, most_beside
        while True:
            suspects = shop.running["a"] + shop.running["b"]
            most = max(most, suspects)
            most_beside = max(most_beside, shop.running["fresh"] if suspects else 0)
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    async with shop.working(concurrency=20, claim_min_idle_ms=300):
        await until(lambda: shop.running["a"] or shop.running["b"], "the first is taken over")
        shop.add("fresh", 60)
        for name, count in zip(names, (5, 5, 60), strict=True):
            await shop.has_run(name, count, within_secs=40)
    watching.cancel()
    assert most == together
    assert most_beside > together, "new jobs run beside them"
