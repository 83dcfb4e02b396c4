# The public names of tampu and the modules that define them: the one list. Type checkers read it, and `__init__.py`
# takes `__all__` and lazy loading from it. One name per line; the order is that of the documentation.

# For applications
from tampu.queue import Queue as Queue
from tampu.task import Task as Task
from tampu.worker import Worker as Worker
from tampu.events import QueueEvents as QueueEvents
from tampu.inspect.jobs import JobState as JobState
from tampu.inspect.snapshot import WorkerInfo as WorkerInfo
from tampu.worker import Handler as Handler
from tampu.consume.context import current_job as current_job

# Around adds and runs
from tampu.middleware import Middleware as Middleware
from tampu.middleware import PendingAdd as PendingAdd
from tampu.middleware import JobEnd as JobEnd
from tampu.consume.dependencies import Depends as Depends

# For building your own engine: every part by itself
from tampu.produce.producer import Producer as Producer
from tampu.sync import SyncProducer as SyncProducer
from tampu.consume.consumer import Consumer as Consumer
from tampu.maintain.promoter import Promoter as Promoter
from tampu.maintain.scheduler import Scheduler as Scheduler

# Settings
from tampu.config import ProducerConfig as ProducerConfig
from tampu.config import ConsumerConfig as ConsumerConfig
from tampu.config import PromoterConfig as PromoterConfig
from tampu.config import SchedulerConfig as SchedulerConfig
from tampu.wire.retry import RetryConfig as RetryConfig

# Jobs
from tampu.wire.job import Job as Job
from tampu.wire.job import JobId as JobId
from tampu.produce.options import AddOptions as AddOptions
from tampu.wire.retry import JobRetryOverride as JobRetryOverride
from tampu.wire.retry import BackoffSpec as BackoffSpec
from tampu.wire.retry import BackoffKind as BackoffKind

# Limits
from tampu.wire.limits import Limit as Limit
from tampu.wire.limits import Limits as Limits

# Payload codecs
from tampu.wire.codec import EncryptedCodec as EncryptedCodec
from tampu.wire.codec import SignedCodec as SignedCodec
from tampu.wire.codec import PayloadCodec as PayloadCodec

# Repeatable jobs
from tampu.wire.repeat import RepeatPattern as RepeatPattern
from tampu.wire.repeat import MissedFiresPolicy as MissedFiresPolicy
from tampu.wire.repeat import RepeatableSpec as RepeatableSpec
from tampu.wire.repeat import RepeatableMeta as RepeatableMeta

# What a handler may return or raise
from tampu.consume.handlers import HandlerError as HandlerError
from tampu.consume.handlers import UnrecoverableError as UnrecoverableError
from tampu.consume.handlers import Retry as Retry
from tampu.consume.handlers import Snooze as Snooze
from tampu.consume.handlers import Cancel as Cancel
from tampu.consume.handlers import Hold as Hold
from tampu.errors import SoftTimeout as SoftTimeout
from tampu.consume.handlers import FailedJob as FailedJob

# Dead letters and events
from tampu.wire.dlq import DlqEntry as DlqEntry
from tampu.wire.dlq import DlqReason as DlqReason
from tampu.wire.events import QueueEvent as QueueEvent

# Metrics
from tampu.metrics import MetricsSink as MetricsSink
from tampu.metrics import NoopSink as NoopSink
from tampu.metrics import InMemorySink as InMemorySink
from tampu.metrics import noop_sink as noop_sink
from tampu.metrics import PromoterTick as PromoterTick
from tampu.metrics import LockOutcome as LockOutcome
from tampu.metrics import ReaderBatch as ReaderBatch
from tampu.metrics import JobOutcome as JobOutcome
from tampu.metrics import JobOutcomeKind as JobOutcomeKind
from tampu.metrics import RetryScheduled as RetryScheduled
from tampu.metrics import DlqRouted as DlqRouted
from tampu.metrics import QueueDepth as QueueDepth

# Errors
from tampu.errors import Error as Error
from tampu.errors import RedisError as RedisError
from tampu.errors import EncodeError as EncodeError
from tampu.errors import DecodeError as DecodeError
from tampu.errors import ConfigError as ConfigError
from tampu.errors import ShutdownError as ShutdownError
from tampu.errors import QueueFullError as QueueFullError
from tampu.errors import OutcomeUnknownError as OutcomeUnknownError
from tampu.errors import JobFailed as JobFailed
from tampu.errors import JobCancelled as JobCancelled
from tampu.errors import ResultNotStored as ResultNotStored
from tampu.errors import NotSupportedError as NotSupportedError

__version__: str

def version() -> str: ...
