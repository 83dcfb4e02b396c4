"""Pins the list of public names, so that adding or removing one is a decision and not an accident."""

from __future__ import annotations

import tampu

#: The low-level API of API.md, and the types it needs.
SEEDS_LEVEL = set(
    """
    Producer ProducerConfig Consumer ConsumerConfig Promoter PromoterConfig Scheduler SchedulerConfig RetryConfig
    Job JobId JobRetryOverride AddOptions BackoffSpec BackoffKind RepeatPattern MissedFiresPolicy RepeatableSpec
    RepeatableMeta DlqEntry DlqReason QueueEvent MetricsSink NoopSink InMemorySink noop_sink PromoterTick LockOutcome
    ReaderBatch JobOutcome JobOutcomeKind RetryScheduled DlqRouted QueueDepth HandlerError UnrecoverableError Retry
    Snooze Cancel Error RedisError EncodeError DecodeError ConfigError ShutdownError QueueFullError OutcomeUnknownError
    Hold Limit Limits
    JobFailed JobCancelled ResultNotStored NotSupportedError
    """.split()
)


PEOPLES_LEVEL = {
    "Queue",
    "Task",
    "Worker",
    "QueueEvents",
    "JobState",
    "WorkerInfo",
    "Handler",
    "current_job",
    "Middleware",
    "PendingAdd",
    "JobEnd",
    "Depends",
    "EncryptedCodec",
    "SignedCodec",
    "PayloadCodec",
    "FailedJob",
    "SoftTimeout",
    "version",
}


def test_the_public_names_are_exactly_these() -> None:
    assert set(tampu.__all__) == PEOPLES_LEVEL | SEEDS_LEVEL | {"SyncProducer"}


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in tampu.__all__:
        assert getattr(tampu, name).__doc__ or name == "Handler", name  # a type alias has no docstring


def test_the_producer_has_every_method_of_the_seeds() -> None:
    methods = """
    connect add add_with_id add_with_options add_bulk add_bulk_with_options add_bulk_named add_in add_at add_in_bulk
    add_in_with_options add_at_with_options add_in_with_id add_at_with_id add_in_bulk_with_ids cancel_delayed
    cancel_delayed_bulk peek_dlq replay_dlq upsert_repeatable list_repeatable remove_repeatable get_result
    get_result_bulk producer_id stream_key delayed_key dlq_key close
    """.split()
    assert [name for name in methods if not hasattr(tampu.Producer, name)] == []
