"""The settings of the engine's parts: every field with its unit and default, checked when they are built.

Frozen, keyword-only values; `dataclasses.replace` makes a changed copy. A value that is not allowed is a `ConfigError`
that names the field.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tampu.base.checks import MAX_U32, check_bool, check_int, check_queue_name, check_text, invalid
from tampu.metrics import MetricsSink, noop_sink
from tampu.wire.payload import PayloadFormat, check_payload_format
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from collections.abc import Callable

Overflow = Literal["reject", "wait", "trim"]
Idempotency = Literal["sequence", "idmp", "off"]

DEFAULT_QUEUE_NAME = "default"
DEFAULT_MAX_STREAM_LEN = 1_000_000
DEFAULT_MAX_DELAY_SECS = 30 * 24 * 3600
DEFAULT_DEDUP_TTL_SECS = 3600
DEFAULT_DLQ_MAX_STREAM_LEN = 100_000
DEFAULT_EVENTS_MAX_STREAM_LEN = 100_000
DEFAULT_LOCK_TTL_SECS = 5
#: Largest envelope a producer adds and a worker runs, in bytes.
DEFAULT_MAX_PAYLOAD_BYTES = 1_048_576
#: Most ids one settle window may hold: the limit of what a script's `unpack` takes, with room for other arguments.
MAX_ACK_BATCH = 1_000


def _number(default: int, *, low: int = 0, high: int | None = None) -> Any:
    check = partial(check_int, low=low) if high is None else partial(check_int, low=low, high=high)
    return field(default=default, metadata={"check": check})


def _checked(check: Callable[[str, Any], object], default: Any) -> Any:
    return field(default=default, metadata={"check": check})


def _one_of(*allowed: str) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if value not in allowed:
            raise invalid(name, value, f"one of {', '.join(repr(choice) for choice in allowed)}")
        return value

    return check


def _instance(kind: type) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise invalid(name, value, f"a {kind.__name__}")
        return value

    return check


def _queue_name() -> Any:
    return _checked(lambda name, value: check_queue_name(value, name), DEFAULT_QUEUE_NAME)


def _own_name(prefix: str) -> Any:
    return field(default_factory=lambda: f"{prefix}-{uuid.uuid4()}", metadata={"check": check_text})


def _worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"


def _metrics() -> Any:
    return field(default_factory=noop_sink, metadata={"check": _instance(MetricsSink)})


class _Checked:
    """Runs each field's check after construction."""

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]  # only dataclasses below derive from it
            check = spec.metadata.get("check")
            if check is not None:
                check(spec.name, getattr(self, spec.name))


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(_Checked):
    """Settings of a `Producer`."""

    #: The queue; part of every key. Defaults to "default".
    queue_name: str = _queue_name()
    #: Accepted and ignored: a producer shares one connection among all its callers. Defaults to 8.
    pool_size: int = _number(8, low=1)
    #: Most entries of the stream; what happens beyond is `overflow`. Defaults to 1,000,000.
    max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: Longest delay in seconds, whole seconds counting; 0 = no limit. Defaults to 30 days.
    max_delay_secs: int = _number(DEFAULT_MAX_DELAY_SECS)
    #: At a full stream: "reject" raises `QueueFullError`, "wait" waits for room, "trim" deletes the oldest entries as
    #: other implementations do, which loses jobs. Defaults to "reject".
    overflow: Overflow = _checked(_one_of("reject", "wait", "trim"), "reject")
    #: What happens to adds under way when the connection is lost: "sequence" sends them again and adds each once, on
    #: any server; "idmp" (XADD IDMP of Redis 8.6, which remembers too few ids for that) and "off" report them in an
    #: `OutcomeUnknownError`. Defaults to "sequence".
    idempotency: Idempotency = _checked(_one_of("sequence", "idmp", "off"), "sequence")
    #: How long an explicit id may not be added again, in seconds, counted from its run time. Defaults to 3600.
    dedup_ttl_secs: int = _number(DEFAULT_DEDUP_TTL_SECS, low=1)
    #: Replicas that must have an add before it is confirmed (WAIT); 0 = none. Defaults to 0.
    min_replicas: int = _number(0)
    #: How long to wait for them, in milliseconds. Defaults to 1000.
    min_replicas_timeout_ms: int = _number(1000, low=1)
    #: How long a lost connection or a passing fault is waited out before an add fails, in seconds. Defaults to 10.
    retry_for_secs: int = _number(10)
    #: Largest job that may be added, in bytes of its envelope (the packed payload and about 45 bytes); 0 = no limit.
    #: Workers dead-letter what is over their own `max_payload_bytes`, so raise both. Defaults to 1 MiB.
    max_payload_bytes: int = _number(DEFAULT_MAX_PAYLOAD_BYTES)
    #: "bin" for Python and Node workers, "inline" for Rust-typed ones. Defaults to "bin".
    payload_format: PayloadFormat = _checked(lambda name, value: check_payload_format(value, name), "bin")
    #: The type of all payloads: a dataclass, msgspec Struct, TypedDict or pydantic model. Defaults to None: any value.
    payload_type: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overflow == "wait" and self.idempotency != "sequence":
            # A window that waits is sent again until all of it has found room.
            raise invalid("idempotency", self.idempotency, "'sequence' with overflow 'wait'")


@dataclass(frozen=True, kw_only=True)
class PromoterConfig(_Checked):
    """Settings of a `Promoter`, which moves due jobs from the delayed set into the stream."""

    queue_name: str = _queue_name()
    #: Longest wait between two looks, in milliseconds. Defaults to 100.
    poll_interval_ms: int = _number(100, low=1)
    #: Most jobs moved in one script call. Defaults to 256.
    promote_batch: int = _number(256, low=1)
    #: At this length of the stream due jobs stay in the delayed set. Defaults to 1,000,000.
    max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: How long a lock outlives a dead leader, in seconds. Defaults to 5.
    lock_ttl_secs: int = _number(DEFAULT_LOCK_TTL_SECS, low=1)
    #: Who holds the lock; unique per process. Defaults to "p-<uuid>".
    holder_id: str = _own_name("p")
    #: Whether to write `waiting` events. Defaults to True.
    events_enabled: bool = _checked(check_bool, True)
    #: About how many events are kept. Defaults to 100,000.
    events_max_stream_len: int = _number(DEFAULT_EVENTS_MAX_STREAM_LEN, low=1)
    #: About how many dead letters are kept; unreadable members become such. Defaults to 100,000.
    dlq_max_stream_len: int = _number(DEFAULT_DLQ_MAX_STREAM_LEN, low=1)
    #: Who is told. Defaults to a sink that drops everything.
    metrics: MetricsSink = _metrics()


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Checked):
    """Settings of a `Scheduler`, which fires repeatable jobs."""

    queue_name: str = _queue_name()
    #: Longest wait between two looks, in milliseconds; it wakes earlier for an earlier fire. Defaults to 1000.
    tick_interval_ms: int = _number(1000, low=1)
    #: Most specs read in one round. Defaults to 256.
    batch: int = _number(256, low=1)
    #: At this length of the stream fires go into the delayed set. Defaults to 1,000,000.
    max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: How long a lock outlives a dead leader, in seconds. Defaults to 5.
    lock_ttl_secs: int = _number(DEFAULT_LOCK_TTL_SECS, low=1)
    #: Who holds the lock; unique per process. Defaults to "s-<uuid>".
    holder_id: str = _own_name("s")
    #: Accepted and ignored: a scheduler has nothing to report to a sink. Defaults to a sink that drops everything.
    metrics: MetricsSink = _metrics()


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(_Checked):
    """Settings of a `Consumer`, with its embedded promoter (`delayed_*`) and scheduler."""

    queue_name: str = _queue_name()
    #: The consumer group. Defaults to "default".
    group: str = _checked(check_text, "default")
    #: This consumer's name in the group; unique per process: `tampu worker --processes N` appends -1 to -N. Defaults to
    #: "<host>:<pid>:<random>".
    consumer_id: str = field(default_factory=_worker_name, metadata={"check": check_text})
    #: Most entries of one read. Defaults to 64.
    batch: int = _number(64, low=1)
    #: How long a read waits for entries, in milliseconds. Defaults to 5000.
    block_ms: int = _number(5000, low=1)
    #: An entry untouched for so long is taken over from its consumer, in milliseconds. Defaults to 30,000.
    claim_min_idle_ms: int = _number(30_000, low=1)
    #: Handlers running at once. Defaults to 100.
    concurrency: int = _number(100, low=1)
    #: Runs of a job in all, unless it says otherwise. Defaults to 3.
    max_attempts: int = _number(3, high=MAX_U32)
    #: Most outcomes written in one go, at most 1000. Defaults to 256.
    ack_batch: int = _number(256, low=1, high=MAX_ACK_BATCH)
    #: How long an outcome waits for others to be written with it, in milliseconds. Defaults to 5.
    ack_idle_ms: int = _number(5)
    #: How long running handlers get after the signal to stop, in seconds. Defaults to 30.
    shutdown_deadline_secs: int = _number(30)
    #: Larger envelopes are dead-lettered unread, in bytes. Defaults to 1 MiB.
    max_payload_bytes: int = _number(DEFAULT_MAX_PAYLOAD_BYTES, low=1)
    #: Unwritten dead letters before handlers wait. Defaults to 32.
    dlq_inflight: int = _number(32, low=1)
    #: About how many dead letters are kept. Defaults to 100,000.
    dlq_max_stream_len: int = _number(DEFAULT_DLQ_MAX_STREAM_LEN, low=1)
    #: The retry curve of jobs without their own.
    retry: RetryConfig = field(default_factory=RetryConfig, metadata={"check": _instance(RetryConfig)})
    #: Unwritten retries before handlers wait. Defaults to 64.
    retry_inflight: int = _number(64, low=1)
    #: Whether to run a promoter too. Defaults to True.
    delayed_enabled: bool = _checked(check_bool, True)
    #: As `PromoterConfig.poll_interval_ms`. Defaults to 100.
    delayed_poll_interval_ms: int = _number(100, low=1)
    #: As `PromoterConfig.promote_batch`. Defaults to 256.
    delayed_promote_batch: int = _number(256, low=1)
    #: As `PromoterConfig.max_stream_len`. Defaults to 1,000,000.
    delayed_max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: As `PromoterConfig.lock_ttl_secs`. Defaults to 5.
    delayed_lock_ttl_secs: int = _number(DEFAULT_LOCK_TTL_SECS, low=1)
    #: Whether to write to the events stream. Defaults to True.
    events_enabled: bool = _checked(check_bool, True)
    #: About how many events are kept. Defaults to 100,000.
    events_max_stream_len: int = _number(DEFAULT_EVENTS_MAX_STREAM_LEN, low=1)
    #: Whether to run a scheduler too. Defaults to True.
    run_scheduler: bool = _checked(check_bool, True)
    #: Its settings; its `queue_name` is replaced by this consumer's.
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig, metadata={"check": _instance(SchedulerConfig)})
    #: Whether to store what handlers return. Defaults to False.
    store_results: bool = _checked(check_bool, False)
    #: How long results are kept, in seconds. Defaults to 3600.
    result_ttl_secs: int = _number(3600, low=1)
    #: Who is told. Defaults to a sink that drops everything.
    metrics: MetricsSink = _metrics()
    #: The type of all payloads, checked when they are read. Defaults to None: any value.
    payload_type: Any = None
    #: How long a handler may block the event loop before its lease is no longer renewed, in milliseconds;
    #: 0 = ten times `claim_min_idle_ms`. Defaults to 0.
    max_block_ms: int = _number(0)
