"""Settings of the seeds: every field has its documented name and default, and invalid values are refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import socket
from typing import Any, get_type_hints

import pytest

import tampu
from tampu import AddOptions, BackoffKind, BackoffSpec, ConfigError, JobRetryOverride, NoopSink, RetryConfig, config

#: As documented by the original; `...` stands for a value that is created for each object.
SEED_DEFAULTS: dict[str, dict[str, Any]] = {
    "ProducerConfig": {
        "queue_name": "default",
        "pool_size": 8,
        "max_stream_len": 1_000_000,
        "max_delay_secs": 30 * 24 * 3600,
    },
    "ConsumerConfig": {
        "queue_name": "default",
        "group": "default",
        "consumer_id": f"{socket.gethostname()}:{os.getpid()}",
        "batch": 256,  # 64 in the seeds: a quarter slower, and the free places limit slow jobs in any case
        "block_ms": 5000,
        "claim_min_idle_ms": 30_000,
        "concurrency": 100,
        "max_attempts": 3,
        "ack_batch": 256,
        "ack_idle_ms": 5,
        "shutdown_deadline_secs": 30,
        "max_payload_bytes": 1_048_576,
        "dlq_inflight": 32,
        "dlq_max_stream_len": 100_000,
        "retry": RetryConfig(),
        "retry_inflight": 256,  # 64 in the seeds: a fifth slower when every job fails once
        "delayed_enabled": True,
        "delayed_poll_interval_ms": 100,
        "delayed_promote_batch": 256,
        "delayed_max_stream_len": 1_000_000,
        "delayed_lock_ttl_secs": 5,
        "events_enabled": True,
        "events_max_stream_len": 100_000,
        "run_scheduler": True,
        "scheduler": ...,
        "store_results": False,
        "result_ttl_secs": 3600,
        "metrics": ...,
    },
    "PromoterConfig": {
        "queue_name": "default",
        "poll_interval_ms": 100,
        "promote_batch": 256,
        "max_stream_len": 1_000_000,
        "lock_ttl_secs": 5,
        "holder_id": ...,
        "events_enabled": True,
        "events_max_stream_len": 100_000,
        "metrics": ...,
    },
    "SchedulerConfig": {
        "queue_name": "default",
        "tick_interval_ms": 1000,
        "batch": 256,
        "max_stream_len": 1_000_000,
        "lock_ttl_secs": 5,
        "holder_id": ...,
        "metrics": ...,
    },
    "RetryConfig": {
        "initial_backoff_ms": 100,
        "max_backoff_ms": 30_000,
        "multiplier": 2.0,
        "jitter_ms": 100,
        "jitter_ratio": 0.0,
    },
}
CONFIGS = [*SEED_DEFAULTS]
NUMBERS = [
    (name, field)
    for name, defaults in SEED_DEFAULTS.items()
    for field, default in defaults.items()
    if isinstance(default, int | float) and not isinstance(default, bool)
]
FLAGS = [
    (name, field) for name, defaults in SEED_DEFAULTS.items() for field, default in defaults.items() if default is True
]

UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_the_seeds_has_its_default(name: str) -> None:
    config = getattr(tampu, name)()
    for field, default in SEED_DEFAULTS[name].items():
        assert hasattr(config, field), field
        if default is not ...:
            assert getattr(config, field) == default, field


@pytest.mark.parametrize(
    ("name", "field", "pattern"),
    [
        ("PromoterConfig", "holder_id", f"p-{UUID}"),
        ("SchedulerConfig", "holder_id", f"s-{UUID}"),
    ],
)
def test_lock_holder_ids_are_unique(name: str, field: str, pattern: str) -> None:
    first, second = (getattr(getattr(tampu, name)(), field) for _ in range(2))
    assert first != second
    assert re.fullmatch(pattern, first)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_frozen_and_takes_keywords_only(name: str) -> None:
    kind = getattr(tampu, name)
    config = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, next(iter(SEED_DEFAULTS[name])), "changed")
    with pytest.raises(TypeError):
        kind("positional")


@pytest.mark.parametrize(
    ("name", "field", "bad"),
    [
        (name, field, bad)
        for name, field in NUMBERS
        for bad in (-1, "7", None, True, float("nan"), 2**70)
        if (field, bad) != ("multiplier", 2**70)  # which is a finite number
    ],
)
def test_a_bad_number_is_refused_with_field_and_value(name: str, field: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        getattr(tampu, name)(**{field: bad})
    assert caught.value.code == "CMQ-004"
    assert repr(bad)[:20] in str(caught.value)


@pytest.mark.parametrize(("name", "field"), FLAGS)
def test_a_flag_is_true_or_false(name: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        getattr(tampu, name)(**{field: "yes"})


@pytest.mark.parametrize("bad", ["", "  ", "a{b", "a}b", "a\x00b", 7, None, "\ud800"])
@pytest.mark.parametrize("name", ["ProducerConfig", "ConsumerConfig", "PromoterConfig", "SchedulerConfig"])
def test_a_bad_queue_name_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match="queue_name"):
        getattr(tampu, name)(queue_name=bad)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("overflow", "drop"),
        ("idempotency", "yes"),
        ("payload_format", "json"),
        ("dedup_ttl_secs", 0),
        ("min_replicas", -1),
    ],
)
def test_an_invalid_choice_of_the_producer_is_refused(field: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        tampu.ProducerConfig(**{field: bad})


@pytest.mark.parametrize("removed", ["idmp", "off"])
def test_a_removed_kind_of_idempotency_is_named(removed: Any) -> None:
    with pytest.raises(ConfigError, match=f"idempotency='{removed}' was removed: leave it out"):
        tampu.ProducerConfig(idempotency=removed)


def test_the_config_enforces_the_limits_of_the_scripts() -> None:
    tampu.ConsumerConfig(ack_batch=1000)
    with pytest.raises(ConfigError, match="ack_batch must be a whole number from 1 to 1000; got 1001"):
        tampu.ConsumerConfig(ack_batch=1001)
    with pytest.raises(ConfigError, match="batch"):  # COUNT 0 would mean "all"
        tampu.ConsumerConfig(batch=0)


def test_parts_of_a_config_must_be_of_their_type() -> None:
    for field in ("retry", "scheduler", "metrics"):
        with pytest.raises(ConfigError, match=field):
            tampu.ConsumerConfig(**{field: {}})
    assert isinstance(tampu.ConsumerConfig().metrics, NoopSink)


def test_add_options_are_chained_and_checked() -> None:
    retry = JobRetryOverride(7, BackoffSpec(BackoffKind.FIXED, 5))
    options = AddOptions().with_id("a").with_name("mail").with_retry(retry)
    assert (options.id, options.name, options.retry) == ("a", "mail", retry)
    bad: list[dict[str, Any]] = [{"id": ""}, {"id": "a\x00"}, {"name": "n" * 257}, {"name": None}, {"retry": 3}]
    for arguments in bad:
        with pytest.raises(ConfigError):
            AddOptions(**arguments)
    assert AddOptions(name="é" * 128).name == "é" * 128
    with pytest.raises(ConfigError, match="256 bytes of UTF-8 \\(it has 258\\)"):
        AddOptions(name="é" * 129)


def test_errors_have_the_codes_of_the_seeds() -> None:
    codes = {
        error.__name__: error.code
        for error in (
            tampu.RedisError,
            tampu.EncodeError,
            tampu.DecodeError,
            tampu.ConfigError,
            tampu.ShutdownError,
            tampu.QueueFullError,
            tampu.OutcomeUnknownError,
        )
    }
    assert [*codes.values()] == [f"CMQ-{number:03d}" for number in range(1, 8)]
    assert [reason.code for reason in tampu.DlqReason] == [f"CMQ-{number:03d}" for number in range(20, 26)]
    assert all(issubclass(getattr(tampu, name), tampu.Error) for name in codes)


@pytest.mark.parametrize(
    ("settings", "config", "owner"),
    [
        (config.ProducerSettings, tampu.ProducerConfig, tampu.Queue),
        (config.ConsumerSettings, tampu.ConsumerConfig, tampu.Worker),
    ],
)
def test_the_typed_settings_are_the_fields_that_are_not_arguments(settings: Any, config: Any, owner: Any) -> None:
    arguments = inspect.signature(owner).parameters.keys() | {"queue_name"}
    types = get_type_hints(config)
    wanted = {name: kind for name, kind in types.items() if name not in arguments}
    assert get_type_hints(settings) == wanted
