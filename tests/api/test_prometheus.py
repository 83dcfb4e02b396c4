"""Metrics as Prometheus scrapes them: names, units and labels, and a limit on the number of series."""

from __future__ import annotations

import asyncio
import builtins
import re
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, start_http_server

from api.workers import working
from docs.doc_pages import DOCS
from support.delayed import delay, member_of
from support.parts import consuming, running
from support.producers import open_producer
from support.queues import QueueView
from support.waiting import until
from tampu import (
    AddOptions,
    BackoffSpec,
    ConfigError,
    DlqReason,
    DlqRouted,
    InMemorySink,
    Job,
    JobOutcome,
    JobOutcomeKind,
    JobRetryOverride,
    LockOutcome,
    Promoter,
    PromoterConfig,
    PromoterTick,
    Queue,
    QueueDepth,
    ReaderBatch,
    RetryScheduled,
    UnrecoverableError,
)
from tampu.inspect.snapshot import read_depth
from tampu.prometheus import PrometheusSink

if TYPE_CHECKING:
    from servers.process import Server


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """Return values by series, from the text that Prometheus would get."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {series: float(value) for series, value in pairs if "_created" not in series}


def test_the_page_names_every_metric_with_its_type_and_labels() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry).for_queue("q")
    collectors: Any = registry._collector_to_names
    exported = {
        f"{one._name}_total" if one._type == "counter" else one._name: (one._type, set(one._labelnames))
        for one in collectors
    }
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(tampu_\w+)` \| (\w+) \| ([^|]+) \|", page, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == exported
    assert set(re.findall(r"tampu_\w+", page)) <= exported.keys()


async def test_a_worker_measures_its_queue_and_how_long_jobs_waited(server: Server) -> None:
    sink = InMemorySink()
    ends = asyncio.Event()

    async def handler(job: Job[Any]) -> None:
        if job.name == "dies":
            raise UnrecoverableError
        await ends.wait()

    view = QueueView(server, "q")
    async with Queue("q", url=server.url) as queue:
        await queue.add("dies", 1)
        for _ in range(4):
            await queue.add("waits", 1)
        await queue.add("later", 1, delay_ms=3_600_000)
        waited_from = int(view.entries()[0][0].split(b"-")[0])
        async with working("q", handler, url=server.url, concurrency=2, read_count=1, metrics=sink):
            await until(lambda: sink.depths and sink.job_outcomes, "it has measured")
            await until(lambda: view.client.xpending(queue.keys.stream, "default")["pending"] >= 2, "two jobs run")
            client = queue.producer.ready_client()
            depth = await read_depth(client, queue.keys, running=2, concurrency=2)
            ends.set()
        assert (depth.waiting + depth.pending, depth.delayed, depth.dead) == (4, 1, 1)
        assert depth.pending in (2, 3)  # it may have fetched one ahead
        assert 0 < depth.oldest_waiting_ms < 60_000
        assert sink.depths[0].concurrency == 2
        view.client.delete(queue.keys.stream)
        assert (await read_depth(client, queue.keys, running=0, concurrency=2)).waiting == 0
    died = next(one for one in sink.job_outcomes if one.name == "dies")
    assert 0 <= died.wait_ms <= time.time() * 1000 - waited_from


def test_every_observation_is_exported_in_base_units() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry).for_queue("q")
    sink.job_outcome(JobOutcome(JobOutcomeKind.OK, 1, 1_500_000, "mail"))
    sink.job_outcome(JobOutcome(JobOutcomeKind.ERR, 2, 500_000, "mail"))
    sink.job_outcome(JobOutcome(JobOutcomeKind.PANIC, 1, 0, ""))
    sink.retry_scheduled(RetryScheduled(2, 1500, "mail"))
    sink.dlq_routed(DlqRouted(DlqReason.RETRIES_EXHAUSTED, 3, "mail"))
    sink.reader_batch(ReaderBatch(64, 3))
    sink.promoter_tick(PromoterTick(7, 12, 2500))
    sink.promoter_lock_outcome(LockOutcome.ACQUIRED)
    sink.job_outcome(JobOutcome(JobOutcomeKind.OK, 1, 0, "slow", 2500))
    sink.queue_depth(QueueDepth(4, 1500, 3, 12, 2, 1, 100))
    told = scraped(registry)
    expected = {
        'tampu_job_runs_total{name="mail",outcome="ok",queue="q"}': 1,
        'tampu_job_runs_total{name="mail",outcome="err",queue="q"}': 1,
        'tampu_job_runs_total{name="",outcome="panic",queue="q"}': 1,
        'tampu_job_duration_seconds_sum{name="mail",queue="q"}': 2.0,
        'tampu_job_duration_seconds_count{name="mail",queue="q"}': 2,
        'tampu_job_duration_seconds_bucket{le="0.5",name="mail",queue="q"}': 1,
        'tampu_retries_total{name="mail",queue="q"}': 1,
        'tampu_retry_delay_seconds_sum{queue="q"}': 1.5,
        'tampu_dead_letters_total{name="mail",queue="q",reason="retries_exhausted"}': 1,
        'tampu_reads_total{queue="q"}': 1,
        'tampu_entries_read_total{queue="q"}': 64,
        'tampu_entries_reclaimed_total{queue="q"}': 3,
        'tampu_promoted_total{queue="q"}': 7,
        'tampu_delayed_jobs{queue="q"}': 12,
        'tampu_promoter_lag_seconds{queue="q"}': 2.5,
        'tampu_promoter_leads{queue="q"}': 1,
        'tampu_job_wait_seconds_sum{name="slow",queue="q"}': 2.5,
        'tampu_waiting_jobs{queue="q"}': 4,
        'tampu_oldest_waiting_seconds{queue="q"}': 1.5,
        'tampu_pending_jobs{queue="q"}': 3,
        'tampu_dead_letters_stored{queue="q"}': 2,
        'tampu_running_jobs{queue="q"}': 1,
        'tampu_concurrency{queue="q"}': 100,
    }
    assert {series: told.get(series) for series in expected} == expected
    assert all(series.startswith("tampu_") for series in told)
    sink.promoter_lock_outcome(LockOutcome.HELD)
    assert scraped(registry)['tampu_promoter_leads{queue="q"}'] == 0


def test_names_beyond_the_limit_are_counted_together() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, max_names=3)
    for number in range(1000):
        # A new sink each time, as in a restarted worker: the limit is per queue.
        sink.for_queue("q").job_outcome(JobOutcome(JobOutcomeKind.OK, 1, 1, f"user {number}"))
        sink.for_queue("q").dlq_routed(DlqRouted(DlqReason.MALFORMED, 0, f"user {number}"))
        sink.for_queue("q").retry_scheduled(RetryScheduled(2, 1, f"user {number}"))
    sink.for_queue("another").job_outcome(JobOutcome(JobOutcomeKind.OK, 1, 1, "user 999"))
    told = scraped(registry)
    runs = {series: value for series, value in told.items() if series.startswith("tampu_job_runs_total")}
    assert runs == {
        'tampu_job_runs_total{name="user 0",outcome="ok",queue="q"}': 1,
        'tampu_job_runs_total{name="user 1",outcome="ok",queue="q"}': 1,
        'tampu_job_runs_total{name="user 2",outcome="ok",queue="q"}': 1,
        'tampu_job_runs_total{name="(other)",outcome="ok",queue="q"}': 997,
        'tampu_job_runs_total{name="user 999",outcome="ok",queue="another"}': 1,
    }
    for metric in ("tampu_dead_letters_total", "tampu_retries_total"):
        assert len([series for series in told if series.startswith(metric)]) == 4


def test_several_sinks_can_share_a_registry() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        PrometheusSink(registry).for_queue("q").reader_batch(ReaderBatch(2, 0))
    assert scraped(registry)['tampu_entries_read_total{queue="q"}'] == 4
    PrometheusSink().for_queue("of the default registry").reader_batch(ReaderBatch(1, 0))
    PrometheusSink().for_queue("of the default registry").reader_batch(ReaderBatch(1, 0))
    assert scraped(REGISTRY)['tampu_entries_read_total{queue="of the default registry"}'] == 2


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_it(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_it)
    with pytest.raises(ConfigError, match=r"pip install 'tampu\[metrics\]'"):
        PrometheusSink()


def test_a_limit_of_zero_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_names must be a whole number of 1 or more; got 0"):
        PrometheusSink(CollectorRegistry(), max_names=0)


async def test_a_worker_and_a_promoter_are_scraped_over_http(server: Server) -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    once = JobRetryOverride(2, BackoffSpec.fixed(1, jitter_ms=0))

    async def handler(job: Job[Any]) -> None:
        if job.name == "hopeless":
            raise UnrecoverableError("no use")
        if job.name == "flaky" and job.attempt == 0:
            raise ValueError("not yet")

    view, other = QueueView(server, "q"), QueueView(server, "another")
    async with open_producer(server.url) as producer:
        await producer.add_bulk_named([("fine", number) for number in range(10)])
        await producer.add_with_options(1, AddOptions(name="flaky", retry=once))
        await producer.add_with_options(1, AddOptions(name="hopeless"))
        delay(other, member_of("due"))
        async with (
            consuming(server.url, handler, queue_name="q", metrics=sink),
            running(Promoter(server.url, PromoterConfig(queue_name="another", metrics=sink))),
        ):
            await until(lambda: view.length() == 0 and not view.delayed(), "all jobs are done")
            await until(other.length, "it is promoted")
            await until(lambda: 'tampu_promoted_total{queue="another"} 1.0' in text_of(registry), "and counted")
            http, thread = start_http_server(0, "127.0.0.1", registry=registry)
            try:
                text = await asyncio.to_thread(get, f"http://127.0.0.1:{http.server_port}/metrics")
            finally:
                await asyncio.to_thread(http.shutdown)
                http.server_close()
                thread.join()
    for line in (
        'tampu_job_runs_total{name="fine",outcome="ok",queue="q"} 10.0',
        'tampu_job_runs_total{name="flaky",outcome="err",queue="q"} 1.0',
        'tampu_job_runs_total{name="flaky",outcome="ok",queue="q"} 1.0',
        'tampu_job_duration_seconds_count{name="fine",queue="q"} 10.0',
        'tampu_retries_total{name="flaky",queue="q"} 1.0',
        'tampu_dead_letters_total{name="hopeless",queue="q",reason="unrecoverable"} 1.0',
        'tampu_entries_read_total{queue="q"} 13.0',
        'tampu_promoter_leads{queue="q"} 1.0',
        'tampu_promoter_leads{queue="another"} 1.0',
        'tampu_delayed_jobs{queue="another"} 0.0',
    ):
        assert line in text.splitlines()


def get(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def text_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()
