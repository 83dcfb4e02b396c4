"""Exports metrics to Prometheus. Install with `pip install 'tampu[metrics]'`.

```python
from prometheus_client import start_http_server
from tampu.prometheus import PrometheusSink

start_http_server(9100)
await Consumer(url, ConsumerConfig(queue_name="emails", metrics=PrometheusSink())).run(handler, shutdown)
```

Every metric is described in `docs/reference/metrics.md`.
"""

from __future__ import annotations

from functools import partial
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
    QueueDepth,
    ReaderBatch,
    RetryScheduled,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

#: Histogram buckets of durations, in seconds.
DURATION_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Histogram buckets of retry delays, in seconds.
DELAY_BUCKETS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
#: Maximum number of job names per queue with their own label: each adds a dozen or more time series.
DEFAULT_MAX_NAMES = 100
#: Label of all other names.
OTHER_NAMES = "(other)"


class PrometheusSink(MetricsSink):
    """Counts and times everything in a Prometheus registry, by queue and job name.

    One sink can serve any number of queues, and one registry any number of sinks.

    Args:
        registry: The registry to use. Defaults to the global `prometheus_client.REGISTRY`.
        max_names: Maximum number of job names per queue with their own label; others are counted as `(other)`.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, max_names: int = DEFAULT_MAX_NAMES) -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError as error:
            raise ConfigError(
                "PrometheusSink needs prometheus-client, which is not installed; run pip install 'tampu[metrics]'"
            ) from error
        self._registry = REGISTRY if registry is None else registry
        self._max_names = check_int("max_names", max_names, low=1)

    def for_queue(self, queue_name: str) -> MetricsSink:
        """Return the sink for one queue."""
        series = _series.get(self._registry)
        if series is None:
            series = _series[self._registry] = _Series(self._registry)
        return _QueueSink(series, queue_name, self._max_names)


class _Series:
    """The metrics of one registry, which accepts each metric name only once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        by_queue, by_name = ("queue",), ("queue", "name")
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, labelnames=by_queue, registry=registry)
        duration = partial(Histogram, labelnames=by_name, buckets=DURATION_BUCKETS, registry=registry)
        delay = partial(Histogram, labelnames=by_queue, buckets=DELAY_BUCKETS, registry=registry)
        self.runs = counter("tampu_job_runs", "Runs of handlers, by outcome.", (*by_name, "outcome"))
        self.durations = duration("tampu_job_duration_seconds", "Duration of runs of handlers.")
        self.waits = duration("tampu_job_wait_seconds", "Time that jobs were in the stream before they ran.")
        self.waiting = gauge("tampu_waiting_jobs", "Jobs that were not delivered to a worker.")
        self.oldest = gauge("tampu_oldest_waiting_seconds", "Age of the oldest waiting job.")
        self.pending = gauge("tampu_pending_jobs", "Jobs that were delivered to a worker and not settled.")
        self.stored_letters = gauge("tampu_dead_letters_stored", "Dead letters in the dead-letter queue.")
        self.running = gauge("tampu_running_jobs", "Jobs that this process is running.")
        self.concurrency = gauge("tampu_concurrency", "Jobs that this process may run at the same time.")
        self.retries = counter("tampu_retries", "Retries scheduled.", by_name)
        self.retry_delays = delay("tampu_retry_delay_seconds", "Backoff before retries.")
        self.dead_letters = counter("tampu_dead_letters", "Jobs moved to the dead-letter queue.", (*by_name, "reason"))
        self.reads = counter("tampu_reads", "Reads that returned at least one job.", by_queue)
        self.entries_read = counter("tampu_entries_read", "Entries returned by reads.", by_queue)
        self.entries_reclaimed = counter("tampu_entries_reclaimed", "Entries that had been delivered before.", by_queue)
        self.promoted = counter("tampu_promoted", "Delayed jobs moved into the stream.", by_queue)
        self.delayed_jobs = gauge("tampu_delayed_jobs", "Delayed jobs, and jobs that wait for a retry.")
        self.lag = gauge("tampu_promoter_lag_seconds", "Age of the oldest overdue delayed job.")
        self.leads = gauge("tampu_promoter_leads", "1 while this process's promoter is the leader, otherwise 0.")
        #: Job names with their own label, by queue.
        self.names: dict[str, set[str]] = {}


_series: WeakKeyDictionary[CollectorRegistry, _Series] = WeakKeyDictionary()


class _QueueSink(MetricsSink):
    """Counts the observations of one queue."""

    def __init__(self, series: _Series, queue_name: str, max_names: int) -> None:
        self._series = series
        self._queue = queue_name
        self._max_names = max_names
        self._names = series.names.setdefault(queue_name, set())
        #: A cache: looking up a series by its labels takes longer than counting.
        self._runs: dict[tuple[str, str], tuple[Counter, Histogram, Histogram]] = {}

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
            found = self._runs[key] = (runs, series.durations.labels(**labels), series.waits.labels(**labels))
        found[0].inc()
        found[1].observe(outcome.handler_duration_us / 1e6)
        found[2].observe(outcome.wait_ms / 1e3)

    def queue_depth(self, depth: QueueDepth) -> None:
        series = self._series
        for gauge, value in (
            (series.waiting, depth.waiting),
            (series.oldest, depth.oldest_waiting_ms / 1e3),
            (series.pending, depth.pending),
            (series.delayed_jobs, depth.delayed),
            (series.stored_letters, depth.dead),
            (series.running, depth.running),
            (series.concurrency, depth.concurrency),
        ):
            gauge.labels(queue=self._queue).set(value)

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
