"""Tells Prometheus what the engine does. Needs the extra `metrics`: `pip install 'tampu[metrics]'`.

```python
from prometheus_client import start_http_server
from tampu.prometheus import PrometheusSink

start_http_server(9100)
await Consumer(url, ConsumerConfig(queue_name="emails", metrics=PrometheusSink())).run(handler, shutdown)
```

| metric                                            | what it is                                                       |
|---------------------------------------------------|------------------------------------------------------------------|
| `tampu_job_runs_total{queue, name, outcome}`      | runs of a handler: `ok`, `err`, or `panic`                       |
| `tampu_job_duration_seconds{queue, name}`         | how long they took                                               |
| `tampu_retries_total{queue, name}`                | jobs that wait for another run                                   |
| `tampu_retry_delay_seconds{queue}`                | for how long                                                     |
| `tampu_dead_letters_total{queue, name, reason}`   | jobs that are not run any more                                   |
| `tampu_reads_total{queue}`                        | reads that brought something                                     |
| `tampu_entries_read_total{queue}`                 | entries they brought                                             |
| `tampu_entries_reclaimed_total{queue}`            | those of them that had been delivered before                     |
| `tampu_promoted_total{queue}`                     | delayed jobs whose time had come                                 |
| `tampu_delayed_jobs{queue}`                       | delayed jobs, as the leading promoter last saw it                |
| `tampu_promoter_lag_seconds{queue}`               | how late the oldest overdue job is, as it last saw it            |
| `tampu_promoter_leads{queue}`                     | 1 while the promoter here leads, 0 while it stands by            |
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tampu.base.checks import check_int
from tampu.errors import ConfigError
from tampu.metrics import (
    DlqRouted,
    JobOutcome,
    LockOutcome,
    MetricsSink,
    PromoterTick,
    ReaderBatch,
    RetryScheduled,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

#: Upper bounds of the durations that are told apart, in seconds.
DURATION_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Upper bounds of the waits before a retry, in seconds.
DELAY_BUCKETS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
#: Most names of jobs told apart in one queue: each is a dozen and more time series.
DEFAULT_MAX_NAMES = 100
#: What the others are counted under.
OTHER_NAMES = "(other)"


class PrometheusSink(MetricsSink):
    """Counts and times everything in a registry, by queue and, up to `max_names` of them, by the jobs' names.

    One sink may serve any number of queues and parts, and any number of sinks one registry.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, max_names: int = DEFAULT_MAX_NAMES) -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError as error:
            raise ConfigError(
                "PrometheusSink needs prometheus-client, which is not installed: run pip install 'tampu[metrics]'"
            ) from error
        self._registry = REGISTRY if registry is None else registry
        self._max_names = check_int("max_names", max_names, low=1)

    def for_queue(self, queue_name: str) -> MetricsSink:
        """The sink of one queue."""
        series = _series.get(self._registry)
        if series is None:
            series = _series[self._registry] = _Series(self._registry)
        return _QueueSink(series, queue_name, self._max_names)


class _Series:
    """The metrics of one registry, which takes each name once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        by_queue, by_name = ("queue",), ("queue", "name")

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, by_queue, registry=registry)

        self.runs = counter("tampu_job_runs", "Runs of handlers.", (*by_name, "outcome"))
        self.durations = Histogram(
            "tampu_job_duration_seconds",
            "How long runs of handlers took.",
            by_name,
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.retries = counter("tampu_retries", "Jobs that wait for another run.", by_name)
        self.retry_delays = Histogram(
            "tampu_retry_delay_seconds",
            "How long jobs wait for another run.",
            by_queue,
            buckets=DELAY_BUCKETS,
            registry=registry,
        )
        self.dead_letters = counter("tampu_dead_letters", "Jobs that are not run any more.", (*by_name, "reason"))
        self.reads = counter("tampu_reads", "Reads that brought something.", by_queue)
        self.entries_read = counter("tampu_entries_read", "Entries that reads brought.", by_queue)
        self.entries_reclaimed = counter("tampu_entries_reclaimed", "Entries that had been delivered before.", by_queue)
        self.promoted = counter("tampu_promoted", "Delayed jobs whose time had come.", by_queue)
        self.delayed_jobs = gauge("tampu_delayed_jobs", "Delayed jobs, as the leading promoter last saw it.")
        self.lag = gauge("tampu_promoter_lag_seconds", "How late the oldest overdue delayed job is.")
        self.leads = gauge("tampu_promoter_leads", "1 while the promoter here leads, 0 while it stands by.")
        #: The names told apart so far, by queue.
        self.names: dict[str, set[str]] = {}


_series: WeakKeyDictionary[CollectorRegistry, _Series] = WeakKeyDictionary()


class _QueueSink(MetricsSink):
    """Tells one queue's part."""

    def __init__(self, series: _Series, queue_name: str, max_names: int) -> None:
        self._series = series
        self._queue = queue_name
        self._max_names = max_names
        self._names = series.names.setdefault(queue_name, set())
        #: Found once: looking a series up by its labels takes longer than counting.
        self._runs: dict[tuple[str, str], tuple[Counter, Histogram]] = {}

    def _label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._max_names:
                return OTHER_NAMES
            self._names.add(name)
        return name

    def job_outcome(self, outcome: JobOutcome) -> None:
        key = (self._label(outcome.name), outcome.kind)
        found = self._runs.get(key)
        if found is None:
            series, labels = self._series, {"queue": self._queue, "name": key[0]}
            runs = series.runs.labels(**labels, outcome=outcome.kind.value)
            found = self._runs[key] = (runs, series.durations.labels(**labels))
        found[0].inc()
        found[1].observe(outcome.handler_duration_us / 1e6)

    def retry_scheduled(self, retry: RetryScheduled) -> None:
        self._series.retries.labels(queue=self._queue, name=self._label(retry.name)).inc()
        self._series.retry_delays.labels(queue=self._queue).observe(retry.backoff_ms / 1e3)

    def dlq_routed(self, dlq: DlqRouted) -> None:
        labels = {"queue": self._queue, "name": self._label(dlq.name), "reason": dlq.reason.as_str()}
        self._series.dead_letters.labels(**labels).inc()

    def reader_batch(self, batch: ReaderBatch) -> None:
        self._series.reads.labels(queue=self._queue).inc()
        self._series.entries_read.labels(queue=self._queue).inc(batch.size)
        self._series.entries_reclaimed.labels(queue=self._queue).inc(batch.reclaimed)

    def promoter_tick(self, tick: PromoterTick) -> None:
        self._series.promoted.labels(queue=self._queue).inc(tick.promoted)
        self._series.delayed_jobs.labels(queue=self._queue).set(tick.depth)
        self._series.lag.labels(queue=self._queue).set(tick.oldest_pending_lag_ms / 1e3)

    def promoter_lock_outcome(self, outcome: LockOutcome) -> None:
        self._series.leads.labels(queue=self._queue).set(1 if outcome is LockOutcome.ACQUIRED else 0)
