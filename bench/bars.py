"""The targets: ratios between the medians of one run that must hold, for producer, consumer, RSMQ and Spark."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.record import Record

US, THEM = "tampu", "chasquimq"
BULK_50, BULK_1000 = "queue-add-bulk-50", "queue-add-bulk-1000"
C_LIMIT = "redis-benchmark"


@dataclass(frozen=True)
class Figure:
    """Locates one number of a run."""

    scenario: str
    contestant: str = US
    figure: str = "rate"


@dataclass(frozen=True)
class Bar:
    """A target: ours divided by theirs must be at least, or at most, `needs`."""

    name: str
    needs: float
    ours: Figure
    #: A figure, or a fixed number.
    theirs: Figure | float
    is_at_most: bool = False
    #: Alternative target for machines that are too slow for a fixed number.
    instead: Bar | None = None


def _beside(name: str, needs: float, scenario: str, other: str = THEM) -> Bar:
    return Bar(name, needs, Figure(scenario), Figure(scenario, other))


DEFAULTS = [
    _beside("worker-default", 5, "worker-default"),
    Bar("worker-default-def-of-async", 0.6, Figure("worker-default-def"), Figure("worker-default")),
    Bar(
        "round-trip-p50-over-ping",
        10,
        Figure("round-trip", US, "p50_ms"),
        Figure("round-trip", US, "ping_ms"),
        is_at_most=True,
    ),
    Bar("round-trip-p99-of-10-ms", 1, Figure("round-trip", US, "p99_ms"), 10.0, is_at_most=True),
    Bar(
        "task-add-over-ping",
        2,
        Figure("one-task-add-beside-one-ping", US, "add_us"),
        Figure("one-task-add-beside-one-ping", US, "ping_us"),
        is_at_most=True,
    ),
]
PRODUCER = [
    _beside("add-bulk-50", 2.6, BULK_50),
    _beside("add-bulk-1000", 3, BULK_1000),
    Bar("add-bulk-iterator", 4, Figure("queue-add-iterator"), Figure(BULK_1000, THEM)),
    _beside("add-bulk-50-of-limit", 0.28, BULK_50, C_LIMIT),
    _beside("add-bulk-1000-of-limit", 0.45, BULK_1000, C_LIMIT),
    Bar("add-bulk-iterator-of-limit", 0.75, Figure("queue-add-iterator"), Figure(BULK_1000, C_LIMIT)),
    _beside("add-concurrent", 4.5, "queue-add-concurrent"),
    Bar(
        "add-one-over-ping",
        1.35,
        Figure("one-add-beside-one-ping", US, "add_us"),
        Figure("one-add-beside-one-ping", US, "ping_us"),
        is_at_most=True,
    ),
    *(
        _beside(f"payload-{what}-{size.replace(' ', '-')}", 1.1, f"payload-{what} {size}")
        for size in ("1 KB", "10 KB", "100 KB", "1 MB")
        for what in ("add", "work")
    ),
]
CONSUMER = [
    _beside("worker-concurrent", 7, "worker-concurrent"),
    Bar(
        "worker-concurrent-batch-64",
        9,
        Figure("worker-concurrent", "tampu, batch 64"),
        Figure("worker-concurrent", THEM),
    ),
    _beside("worker-concurrent-events", 7.5, "worker-concurrent-events"),
    _beside("worker-concurrent-of-limit", 0.6, "worker-concurrent", "bare loop"),
    _beside("worker-delayed-end-to-end", 4.5, "worker-delayed-end-to-end"),
    _beside("worker-retry-throughput", 6, "worker-retry-throughput"),
    Bar("pickup-p50-idle-of-2-ms", 1, Figure("latency-100", US, "p50_ms"), 2.0, is_at_most=True),
    Bar("pickup-p99-of-10-ms", 1, Figure("latency-1000", US, "p99_ms"), 10.0, is_at_most=True),
]
MEMORY = [
    Bar("worker-memory-of-150-mb", 1, Figure("memory", US, "worker_mb"), 150.0, is_at_most=True),
    Bar("producer-memory-of-200-mb", 1, Figure("memory", US, "producer_mb"), 200.0, is_at_most=True),
]
SERVER_MEMORY = [
    Bar(
        f"delayed-memory-{size.replace(' ', '-')}",
        1.3,
        Figure(f"server-memory {size}", US, "delayed_bytes"),
        Figure(f"server-memory {size}", THEM, "delayed_bytes"),
        is_at_most=True,
    )
    for size in ("100 B", "1 KB")
]
RSMQ = [
    _beside("rsmq-send-js", 1.5, "rsmq-send", "rsmq (npm)"),
    _beside("rsmq-receive-delete-js", 1.3, "rsmq-receive-delete", "rsmq (npm)"),
    _beside("rsmq-send-pyrsmq", 2.5, "rsmq-send", "PyRSMQ"),
    _beside("rsmq-receive-delete-pyrsmq", 2.5, "rsmq-receive-delete", "PyRSMQ"),
    *(
        Bar(f"rsmq-{what}-{how.replace(' ', '-')}", 8, Figure(f"rsmq-{what}", f"tampu, {how}"), Figure(f"rsmq-{what}"))
        for how in ("100 callers", "batches")
        for what in ("send", "receive-delete")
    ),
]
#: Entries per second that one plain Python process read on the machine where Spark's fixed targets were set.
PLAIN_READ = 426_000.0


def _spark_rate(what: str, needs: float) -> Bar:
    ours = Figure(f"spark-{what}", "Spark")
    share = Bar(f"spark-{what}-share-of-plain", needs / PLAIN_READ, ours, Figure("spark-read", "plain Python"))
    return Bar(f"spark-{what}-of-{needs / 1000:.0f}k", 1, ours, needs, instead=share)


SPARK = [
    Bar("spark-read-of-plain", 0.75, Figure("spark-read", "Spark, Arrow"), Figure("spark-read", "plain Python")),
    Bar("spark-read-over-tuples", 1.25, Figure("spark-read", "Spark, Arrow"), Figure("spark-read", "Spark, tuples")),
    Bar("spark-sink-over-redis-py", 1.5, Figure("spark-sink", "Spark"), Figure("spark-sink", "redis-py pipeline")),
    _spark_rate("bronze", 70_000.0),
    _spark_rate("worker", 25_000.0),
]
ALL = [*DEFAULTS, *PRODUCER, *CONSUMER, *MEMORY, *SERVER_MEMORY, *RSMQ, *SPARK]


def judge(record: Record, bars: list[Bar] = ALL) -> list[str]:
    """Add all targets that the record has figures for to the record; return one line for each."""
    lines = []
    for bar in bars:
        ratio = _ratio(record, bar)
        if ratio is not None and not _holds(bar, ratio) and bar.instead is not None:
            bar, ratio = bar.instead, _ratio(record, bar.instead)
        if ratio is None:
            continue
        holds = _holds(bar, ratio)
        cpu = _cpu_per_job(record, bar)
        record.bars.append(
            {"name": bar.name, "ratio": ratio, "needs": bar.needs, "is_at_most": bar.is_at_most, "holds": holds}
            | ({} if cpu is None else {"cpu_us": cpu[0], "their_cpu_us": cpu[1]})
        )
        line = f"bar {bar.name} ratio {ratio:.2f} needs {bar.needs:.3g} {'ok' if holds else 'short'}"
        if cpu is not None:
            line += f"; cpu per job {cpu[0]:.1f} us, {THEM} {cpu[1]:.1f} us, ratio {cpu[1] / cpu[0]:.2f}"
        lines.append(line)
    return lines


def _cpu_per_job(record: Record, bar: Bar) -> tuple[float, float] | None:
    """Return our and chasquimq's CPU time per job, client and server together, if the bar compares their rates.

    A busy machine disturbs it far less than a rate.
    """
    theirs = bar.theirs
    if isinstance(theirs, float) or theirs.contestant != THEM or bar.ours.figure != "rate":
        return None
    found = []
    for figure in (bar.ours, theirs):
        sides = [record.values(figure.scenario, figure.contestant, side) for side in ("client_us", "server_us")]
        if not all(sides):
            return None
        found.append(statistics.median(map(sum, zip(*sides, strict=True))))
    return found[0], found[1]


def _ratio(record: Record, bar: Bar) -> float | None:
    def median(figure: Figure) -> float | None:
        return record.median(figure.scenario, figure.contestant, figure.figure)

    ours = median(bar.ours)
    theirs = bar.theirs if isinstance(bar.theirs, float) else median(bar.theirs)
    return None if ours is None or not theirs else ours / theirs


def _holds(bar: Bar, ratio: float) -> bool:
    return ratio <= bar.needs if bar.is_at_most else ratio >= bar.needs
