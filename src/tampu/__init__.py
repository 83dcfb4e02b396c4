"""tampu: a job queue and message broker on Redis Streams and MessagePack, wire-compatible with ChasquiMQ and RSMQ."""

from tampu.current_job import current_job
from tampu.engine.config import ConsumerConfig, ProducerConfig, PromoterConfig, SchedulerConfig
from tampu.engine.consumer import Consumer
from tampu.engine.handlers import Cancel, HandlerError, Retry, UnrecoverableError
from tampu.engine.metrics import (
    DlqRouted,
    InMemorySink,
    JobOutcome,
    JobOutcomeKind,
    LockOutcome,
    MetricsSink,
    NoopSink,
    PromoterTick,
    ReaderBatch,
    RetryScheduled,
    noop_sink,
)
from tampu.engine.options import AddOptions
from tampu.engine.producer import Producer
from tampu.engine.promoter import Promoter
from tampu.engine.scheduler import Scheduler
from tampu.engine.sync_producer import SyncProducer
from tampu.errors import (
    ConfigError,
    DecodeError,
    EncodeError,
    Error,
    JobFailed,
    NotSupportedError,
    OutcomeUnknownError,
    QueueFullError,
    RedisError,
    ShutdownError,
)
from tampu.job_state import JobState
from tampu.queue import Queue
from tampu.queue_events import QueueEvents
from tampu.task import Task
from tampu.wire.dlq import DlqEntry, DlqReason
from tampu.wire.events import QueueEvent
from tampu.wire.job import Job, JobId
from tampu.wire.repeat import MissedFiresPolicy, RepeatableMeta, RepeatableSpec, RepeatPattern
from tampu.wire.retry import BackoffKind, BackoffSpec, JobRetryOverride, RetryConfig
from tampu.worker import Handler, Worker

__version__ = "0.1.0"


def version() -> str:
    """The version of this package."""
    return __version__


__all__ = [  # noqa: RUF022 - grouped by what they are for
    # --- the level people use
    "Queue",
    "Task",
    "Worker",
    "QueueEvents",
    "JobState",
    "Handler",
    "current_job",
    "version",
    # --- the level of the seeds: every part by itself
    "Producer",
    "SyncProducer",
    "Consumer",
    "Promoter",
    "Scheduler",
    # settings
    "ProducerConfig",
    "ConsumerConfig",
    "PromoterConfig",
    "SchedulerConfig",
    "RetryConfig",
    # jobs
    "Job",
    "JobId",
    "AddOptions",
    "JobRetryOverride",
    "BackoffSpec",
    "BackoffKind",
    # repeatable jobs
    "RepeatPattern",
    "MissedFiresPolicy",
    "RepeatableSpec",
    "RepeatableMeta",
    # what a handler may say
    "HandlerError",
    "UnrecoverableError",
    "Retry",
    "Cancel",
    # dead letters and events
    "DlqEntry",
    "DlqReason",
    "QueueEvent",
    # metrics
    "MetricsSink",
    "NoopSink",
    "InMemorySink",
    "noop_sink",
    "PromoterTick",
    "LockOutcome",
    "ReaderBatch",
    "JobOutcome",
    "JobOutcomeKind",
    "RetryScheduled",
    "DlqRouted",
    # errors
    "Error",
    "RedisError",
    "EncodeError",
    "DecodeError",
    "ConfigError",
    "ShutdownError",
    "QueueFullError",
    "OutcomeUnknownError",
    "JobFailed",
    "NotSupportedError",
]
