"""tampu: a job queue and message broker on Redis Streams and MessagePack, wire-compatible with ChasquiMQ and RSMQ.

The names are loaded when they are first used: a web process that only adds jobs does not load the worker, and a
command that only prints its help does not load a Redis client.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # checkers take it for True; loading typing for it would double the time of this import
if TYPE_CHECKING:
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
    from tampu.job_context import current_job
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

#: Where each of them is: what type checkers read above.
_MODULES = {
    "tampu.job_context": "current_job",
    "tampu.engine.config": "ConsumerConfig ProducerConfig PromoterConfig SchedulerConfig",
    "tampu.engine.consumer": "Consumer",
    "tampu.engine.handlers": "Cancel HandlerError Retry UnrecoverableError",
    "tampu.engine.metrics": (
        "DlqRouted InMemorySink JobOutcome JobOutcomeKind LockOutcome MetricsSink NoopSink PromoterTick ReaderBatch "
        "RetryScheduled noop_sink"
    ),
    "tampu.engine.options": "AddOptions",
    "tampu.engine.producer": "Producer",
    "tampu.engine.promoter": "Promoter",
    "tampu.engine.scheduler": "Scheduler",
    "tampu.engine.sync_producer": "SyncProducer",
    "tampu.errors": (
        "ConfigError DecodeError EncodeError Error JobFailed NotSupportedError OutcomeUnknownError QueueFullError "
        "RedisError ShutdownError"
    ),
    "tampu.job_state": "JobState",
    "tampu.queue": "Queue",
    "tampu.queue_events": "QueueEvents",
    "tampu.task": "Task",
    "tampu.wire.dlq": "DlqEntry DlqReason",
    "tampu.wire.events": "QueueEvent",
    "tampu.wire.job": "Job JobId",
    "tampu.wire.repeat": "MissedFiresPolicy RepeatableMeta RepeatableSpec RepeatPattern",
    "tampu.wire.retry": "BackoffKind BackoffSpec JobRetryOverride RetryConfig",
    "tampu.worker": "Handler Worker",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

if not TYPE_CHECKING:  # a checker that saw it would believe in any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'tampu' has no attribute {name!r}")
        try:
            module = import_module(_HOMES[name])
        except ImportError as error:
            from tampu.shadowing import explained

            raise explained(error) from error
        found = globals()[name] = getattr(module, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
