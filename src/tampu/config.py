"""Settings of producers, consumers, promoters and schedulers, with unit and default, checked on creation.

All are frozen and keyword-only; use `dataclasses.replace` to change a copy. An invalid value raises `ConfigError`
with the name of the field.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from tampu.base.checks import MAX_U32, MAX_U64, check_bool, check_int, check_queue_name, check_text, invalid
from tampu.errors import ConfigError
from tampu.metrics import MetricsSink, noop_sink
from tampu.wire.codec import PayloadCodec
from tampu.wire.payload import PayloadFormat, check_payload_format
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Overflow = Literal["reject", "wait", "trim"]
Idempotency = Literal["sequence"]

DEFAULT_QUEUE_NAME = "default"
DEFAULT_MAX_STREAM_LEN = 1_000_000
DEFAULT_MAX_DELAY_SECS = 30 * 24 * 3600
DEFAULT_DEDUP_TTL_SECS = 3600
DEFAULT_DLQ_MAX_STREAM_LEN = 100_000
DEFAULT_EVENTS_MAX_STREAM_LEN = 100_000
DEFAULT_LOCK_TTL_SECS = 5
#: Maximum size of a job's envelope that a producer adds and a worker runs, in bytes.
DEFAULT_MAX_PAYLOAD_BYTES = 1_048_576
#: Size of one read that a worker aims at, in bytes.
DEFAULT_MAX_READ_BYTES = 16_777_216
#: Maximum number of IDs in one settle window: the limit of Lua's `unpack`, with room for other arguments.
MAX_ACK_BATCH = 1_000


def _checked(check: Callable[[str, Any], object], default: Any = MISSING, *, factory: Any = MISSING) -> Any:
    return field(default=default, default_factory=factory, metadata={"check": check})


def _number(default: int, *, low: int = 0, high: int = MAX_U64) -> Any:
    return _checked(partial(check_int, low=low, high=high), default)


def _only(is_allowed: Callable[[Any], bool], allowed: str) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> None:
        if not is_allowed(value):
            raise invalid(name, value, allowed)

    return check


def _instance(kind: type) -> Callable[[str, object], object]:
    return _only(lambda value: isinstance(value, kind), f"a {kind.__name__}")


_codec = _only(
    lambda value: value is None or isinstance(value, PayloadCodec),
    "an EncryptedCodec, a SignedCodec or an object with seal and open",
)
_overflow = _only(lambda value: value in ("reject", "wait", "trim"), "one of 'reject', 'wait', 'trim'")


def _idempotency(name: str, value: object) -> None:
    if value in ("idmp", "off"):
        raise ConfigError(f"{name}={value!r} was removed: leave it out, every add is applied once on any server")
    if value != "sequence":
        raise invalid(name, value, "'sequence'")


def _queue_name() -> Any:
    return _checked(lambda name, value: check_queue_name(value, name), DEFAULT_QUEUE_NAME)


def _own_name(prefix: str) -> Any:
    return _checked(check_text, factory=lambda: f"{prefix}-{uuid.uuid4()}")


def _worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _metrics() -> Any:
    return _checked(_instance(MetricsSink), factory=noop_sink)


class _Checked:
    """Runs the check of each field after construction."""

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]  # only dataclasses below derive from it
            check = spec.metadata.get("check")
            if check is not None:
                check(spec.name, getattr(self, spec.name))


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(_Checked):
    """Settings of a `Producer`."""

    #: Queue name; part of every key. Defaults to "default".
    queue_name: str = _queue_name()
    #: Accepted and ignored: a producer shares one connection among all its callers. Defaults to 8.
    pool_size: int = _number(8, low=1)
    #: Maximum length of the stream; `overflow` says what happens when it is reached. Defaults to 1,000,000.
    max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: Maximum delay in seconds; fractions of a second are ignored; 0 = no limit. Defaults to 30 days.
    max_delay_secs: int = _number(DEFAULT_MAX_DELAY_SECS)
    #: When the stream is full: "reject" raises `QueueFullError`, "wait" waits for room, "trim" deletes the oldest
    #: entries, as other implementations do, which loses jobs. Defaults to "reject".
    overflow: Overflow = _checked(_overflow, "reject")
    #: Adds in progress when the connection is lost are sent again, and each job is added once, on any server. This is
    #: the only value: "idmp" and "off", which raised `OutcomeUnknownError` instead, were removed. Defaults to
    #: "sequence".
    idempotency: Idempotency = _checked(_idempotency, "sequence")
    #: How long an explicit ID cannot be added again, in seconds after the job's run time. Defaults to 3600.
    dedup_ttl_secs: int = _number(DEFAULT_DEDUP_TTL_SECS, low=1)
    #: Number of replicas that must have an add before it is confirmed (WAIT). Defaults to 0.
    min_replicas: int = _number(0)
    #: How long to wait for the replicas, in milliseconds. Defaults to 1000.
    min_replicas_timeout_ms: int = _number(1000, low=1)
    #: How long to retry after a lost connection or a temporary error before an add fails, in seconds. Defaults to 10.
    retry_for_secs: int = _number(10)
    #: Maximum size of a job's envelope in bytes (the packed payload plus about 45); 0 = no limit. Workers dead-letter
    #: envelopes over their own `max_payload_bytes`, so raise both. Defaults to 1 MiB.
    max_payload_bytes: int = _number(DEFAULT_MAX_PAYLOAD_BYTES)
    #: "bin" for Python and Node workers, "inline" for typed Rust workers. Defaults to "bin".
    payload_format: PayloadFormat = _checked(lambda name, value: check_payload_format(value, name), "bin")
    #: Type of all payloads: a dataclass, msgspec Struct, TypedDict or pydantic model. Defaults to None: any value.
    payload_type: Any = None
    #: Encrypts or signs payloads and results: `EncryptedCodec` or `SignedCodec`. Defaults to None: plain MessagePack.
    codec: PayloadCodec | None = _checked(_codec, None)
    #: Operator name recorded in audit events; "" = `TAMPU_OPERATOR`, or `user@host`. Defaults to "".
    operator: str = _checked(lambda name, value: check_text(name, value, blank_ok=True), "")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec is not None and self.payload_format != "bin":
            raise invalid("payload_format", self.payload_format, "'bin' with a codec")


@dataclass(frozen=True, kw_only=True)
class PromoterConfig(_Checked):
    """Settings of a `Promoter`, which moves due jobs from the delayed set into the stream."""

    queue_name: str = _queue_name()
    #: Time between two polls for delayed jobs that were not announced, in milliseconds. Ten times longer, but at most
    #: a second, while all jobs are announced (tampu announces its own). Defaults to 100.
    poll_interval_ms: int = _number(100, low=1)
    #: Maximum number of jobs moved per script call. Defaults to 256.
    promote_batch: int = _number(256, low=1)
    #: While the stream is at least this long, due jobs stay in the delayed set. Defaults to 1,000,000.
    max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: How long the lock of a leader that died stays taken, in seconds. Defaults to 5.
    lock_ttl_secs: int = _number(DEFAULT_LOCK_TTL_SECS, low=1)
    #: Name of the lock holder; must be unique per process. Defaults to "p-<uuid>".
    holder_id: str = _own_name("p")
    #: Write `waiting` events. Defaults to True.
    events_enabled: bool = _checked(check_bool, True)
    #: Approximate number of events kept. Defaults to 100,000.
    events_max_stream_len: int = _number(DEFAULT_EVENTS_MAX_STREAM_LEN, low=1)
    #: Approximate number of dead letters kept; undecodable delayed jobs are dead-lettered. Defaults to 100,000.
    dlq_max_stream_len: int = _number(DEFAULT_DLQ_MAX_STREAM_LEN, low=1)
    #: Metrics sink. Defaults to no metrics.
    metrics: MetricsSink = _metrics()


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Checked):
    """Settings of a `Scheduler`, which enqueues the jobs of schedules."""

    queue_name: str = _queue_name()
    #: Maximum time between two polls, in milliseconds; it wakes up earlier for an earlier fire. Defaults to 1000.
    tick_interval_ms: int = _number(1000, low=1)
    #: Maximum number of schedules read per round. Defaults to 256.
    batch: int = _number(256, low=1)
    #: While the stream is at least this long, fired jobs go to the delayed set. Defaults to 1,000,000.
    max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: How long the lock of a leader that died stays taken, in seconds. Defaults to 5.
    lock_ttl_secs: int = _number(DEFAULT_LOCK_TTL_SECS, low=1)
    #: Name of the lock holder; must be unique per process. Defaults to "s-<uuid>"; a worker uses its `consumer_id`.
    holder_id: str = _own_name("s")
    #: Accepted and ignored: a scheduler reports no metrics. Defaults to no metrics.
    metrics: MetricsSink = _metrics()


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(_Checked):
    """Settings of a `Consumer` and of its built-in promoter (`delayed_*`) and scheduler."""

    queue_name: str = _queue_name()
    #: Consumer group. Defaults to "default".
    group: str = _checked(check_text, "default")
    #: Name of this consumer in the group. On the server a random suffix follows, so that no two processes share a name.
    #: Defaults to "<host>:<pid>".
    consumer_id: str = _checked(check_text, factory=_worker_name)
    #: Maximum number of entries per read. While jobs are slow, a worker reads no more than it has free slots. Defaults
    #: to 256.
    batch: int = _number(256, low=1)
    #: Target size of one read, in bytes; large entries are read in smaller batches. Defaults to 16 MiB.
    max_read_bytes: int = _number(DEFAULT_MAX_READ_BYTES, low=1)
    #: How long a read waits for entries, in milliseconds. Defaults to 5000.
    block_ms: int = _number(5000, low=1)
    #: Time without a lease renewal after which an entry is taken over, in milliseconds. Defaults to 30,000.
    claim_min_idle_ms: int = _number(30_000, low=1)
    #: Maximum number of jobs that run at the same time. Defaults to 100.
    concurrency: int = _number(100, low=1)
    #: Maximum number of attempts of a job that sets none. Defaults to 3.
    max_attempts: int = _number(3, high=MAX_U32)
    #: Maximum number of outcomes written per script call, at most 1000. Defaults to 256.
    ack_batch: int = _number(256, low=1, high=MAX_ACK_BATCH)
    #: How long `active` events, and outcomes while more jobs are waiting to be started, are collected before they are
    #: written together, in milliseconds. If no jobs are waiting, outcomes are written immediately. Defaults to 5.
    ack_idle_ms: int = _number(5)
    #: Maximum time for running jobs to finish after a stop signal, in seconds. Defaults to 30.
    shutdown_deadline_secs: int = _number(30)
    #: Maximum size of an envelope, in bytes; larger ones are dead-lettered without being decoded. Defaults to 1 MiB.
    max_payload_bytes: int = _number(DEFAULT_MAX_PAYLOAD_BYTES, low=1)
    #: Maximum number of dead letters waiting to be written; handlers wait beyond that. Defaults to 32.
    dlq_inflight: int = _number(32, low=1)
    #: Approximate number of dead letters kept. Defaults to 100,000.
    dlq_max_stream_len: int = _number(DEFAULT_DLQ_MAX_STREAM_LEN, low=1)
    #: Backoff of jobs that do not set one.
    retry: RetryConfig = _checked(_instance(RetryConfig), factory=RetryConfig)
    #: Maximum number of retries waiting to be written; handlers wait beyond that. Defaults to 256.
    retry_inflight: int = _number(256, low=1)
    #: Run a promoter too. Defaults to True.
    delayed_enabled: bool = _checked(check_bool, True)
    #: Same as `PromoterConfig.poll_interval_ms`. Defaults to 100.
    delayed_poll_interval_ms: int = _number(100, low=1)
    #: Same as `PromoterConfig.promote_batch`. Defaults to 256.
    delayed_promote_batch: int = _number(256, low=1)
    #: Same as `PromoterConfig.max_stream_len`. Defaults to 1,000,000.
    delayed_max_stream_len: int = _number(DEFAULT_MAX_STREAM_LEN, low=1)
    #: Same as `PromoterConfig.lock_ttl_secs`. Defaults to 5.
    delayed_lock_ttl_secs: int = _number(DEFAULT_LOCK_TTL_SECS, low=1)
    #: Write to the events stream. Defaults to True.
    events_enabled: bool = _checked(check_bool, True)
    #: Approximate number of events kept. Defaults to 100,000.
    events_max_stream_len: int = _number(DEFAULT_EVENTS_MAX_STREAM_LEN, low=1)
    #: Run a scheduler too. Defaults to True.
    run_scheduler: bool = _checked(check_bool, True)
    #: Settings of the scheduler; its `queue_name` is replaced by this consumer's.
    scheduler: SchedulerConfig = _checked(_instance(SchedulerConfig), factory=SchedulerConfig)
    #: Store the return values of handlers. Defaults to False.
    store_results: bool = _checked(check_bool, False)
    #: How long results are kept, in seconds. Defaults to 3600.
    result_ttl_secs: int = _number(3600, low=1)
    #: Metrics sink. Defaults to no metrics.
    metrics: MetricsSink = _metrics()
    #: Type of all payloads, checked when they are decoded. Defaults to None: any value.
    payload_type: Any = None
    #: Opens payloads that a producer's `codec` has encrypted or signed, and seals results. Jobs whose payloads cannot
    #: be opened become dead letters. Defaults to None, in a `Worker` to the codec of its queue.
    codec: PayloadCodec | None = _checked(_codec, None)
    #: How long a handler may block the event loop before its lease is no longer renewed, in milliseconds;
    #: 0 = ten times `claim_min_idle_ms`. Defaults to 0.
    max_block_ms: int = _number(0)


C = TypeVar("C", ProducerConfig, ConsumerConfig)


def settings_of(owner: str, config: type[C], settings: Mapping[str, Any], **arguments: Any) -> C:
    """Return the settings of an object from its arguments; None means the default.

    Raises `TypeError` for a setting that is not a field of `config`, as for any unknown argument.
    """
    for name in settings.keys() - {spec.name for spec in fields(config)} | settings.keys() & {"queue_name"}:
        raise TypeError(f"{owner}() got an unexpected setting {name!r}; {config.__name__} lists the valid ones")
    return config(**{name: value for name, value in {**arguments, **settings}.items() if value is not None})


class ProducerSettings(TypedDict, total=False):
    """The fields of `ProducerConfig` that `Queue(..., **settings)` takes in addition to its own arguments."""

    pool_size: int
    overflow: Overflow
    idempotency: Idempotency
    dedup_ttl_secs: int
    min_replicas: int
    min_replicas_timeout_ms: int
    retry_for_secs: int
    max_payload_bytes: int
    payload_format: PayloadFormat
    payload_type: Any
    operator: str


class ConsumerSettings(TypedDict, total=False):
    """The fields of `ConsumerConfig` that `Worker(..., **settings)` takes in addition to its own arguments."""

    batch: int
    max_read_bytes: int
    block_ms: int
    ack_batch: int
    ack_idle_ms: int
    shutdown_deadline_secs: int
    dlq_inflight: int
    retry: RetryConfig
    retry_inflight: int
    delayed_poll_interval_ms: int
    delayed_promote_batch: int
    delayed_max_stream_len: int
    delayed_lock_ttl_secs: int
    events_max_stream_len: int
    scheduler: SchedulerConfig
    result_ttl_secs: int
    metrics: MetricsSink
    payload_type: Any
    codec: PayloadCodec | None
    max_block_ms: int
