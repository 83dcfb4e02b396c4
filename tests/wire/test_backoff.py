"""Retries: the delay before the next one, compared with ChasquiMQ 1.3.0, and settings that are rejected."""

from __future__ import annotations

import ast
import math
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.base.checks import MAX_U32, MAX_U64
from tampu.errors import ConfigError
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.retry import BackoffKind, BackoffSpec, JobRetryOverride, RetryConfig, WireBackoff, backoff_ms
from tampu.wire.retry import from_wire_backoff as read_backoff

from .strategies import examples
from .vectors import load, vectors

DEFAULTS = RetryConfig()


def no_jitter(_below: int) -> int:
    return 0


def most_jitter(below: int) -> int:
    return below - 1


def spec_of(text: str) -> BackoffSpec | None:
    """Parse a spec of the vectors: the repr of the shim's class or of a dict."""
    if text == "None":
        return None
    fields = (
        ast.literal_eval("{" + re.sub(r"(\w+)=", r"'\1': ", text[len("BackoffSpec(") : -1]) + "}")
        if "=" in text
        else None
    )
    wanted = fields or ast.literal_eval(text)
    names = ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms")
    return read_backoff(WireBackoff(*(wanted.get(name) for name in names)))  # -2.0 is a multiplier peers write


@pytest.mark.parametrize("vector", [v for v in vectors("cmq_backoff.json") if "spec" in v.values[0]])
def test_the_first_wait_is_in_the_captured_range(vector: dict[str, Any]) -> None:
    spec = spec_of(vector["spec"])
    least = backoff_ms(1, spec, DEFAULTS, no_jitter)
    most = backoff_ms(1, spec, DEFAULTS, most_jitter)
    assert least <= vector["min"] <= vector["max"] <= most
    # The captured 150 draws do not include every value, but come near both ends: the ranges are the same.
    assert vector["min"] - least <= 3
    assert most - vector["max"] <= 3
    draws = {backoff_ms(1, spec, DEFAULTS, random.Random(seed).randrange) for seed in range(500)}
    assert draws <= set(range(least, most + 1))
    assert len(draws) >= vector["distinct"]


@pytest.mark.parametrize("vector", [v for v in vectors("cmq_backoff.json") if "observed" in v.values[0]])
def test_waits_grow_as_captured(vector: dict[str, Any]) -> None:
    tripled = BackoffSpec.exponential(10, multiplier=3, max_ms=500, jitter_ms=0)
    one_and_a_half = BackoffSpec.exponential(10, multiplier=1.5, jitter_ms=0)
    for spec, observed in zip((tripled, one_and_a_half), vector["observed"], strict=True):
        for about_to_run, waited_ms in observed:
            assert backoff_ms(about_to_run - 1, spec, DEFAULTS, no_jitter) == waited_ms


def test_jitter_is_added_after_the_cap() -> None:
    spec = BackoffSpec.exponential(1000, max_ms=50, jitter_ms=10)
    assert backoff_ms(1, spec, DEFAULTS, most_jitter) == 59


def test_before_the_first_retry_there_is_nothing_to_multiply() -> None:
    for retry_number in (0, 1):
        assert backoff_ms(retry_number, BackoffSpec.exponential(7, multiplier=0, jitter_ms=0), DEFAULTS, no_jitter) == 7


def test_a_fixed_wait_does_not_grow_but_is_capped() -> None:
    assert [backoff_ms(n, BackoffSpec.fixed(7, 0), DEFAULTS, no_jitter) for n in (1, 2, 30)] == [7, 7, 7]
    assert backoff_ms(1, BackoffSpec.fixed(100_000, 0), DEFAULTS, no_jitter) == 30_000


def test_an_unknown_kind_waits_like_an_exponential_one() -> None:
    for n in range(1, 12):
        unknown, exponential = (BackoffSpec(kind, 10) for kind in (BackoffKind.UNKNOWN, BackoffKind.EXPONENTIAL))
        assert backoff_ms(n, unknown, DEFAULTS, no_jitter) == backoff_ms(n, exponential, DEFAULTS, no_jitter)


def test_fields_that_the_job_leaves_out_use_the_workers_settings() -> None:
    queue = RetryConfig(initial_backoff_ms=5, max_backoff_ms=40, multiplier=3, jitter_ms=2)
    assert [backoff_ms(n, None, queue, most_jitter) for n in (1, 2, 3, 4)] == [6, 16, 41, 41]
    spec = BackoffSpec("exponential", 7)  # type: ignore[arg-type]  # a plain str does too
    assert [backoff_ms(n, spec, queue, no_jitter) for n in (1, 2, 3)] == [7, 21, 40]


def test_jitter_can_grow_with_the_delay() -> None:
    tasks = RetryConfig(initial_backoff_ms=1000, multiplier=3, jitter_ms=0, jitter_ratio=0.25)
    assert [backoff_ms(n, None, tasks, no_jitter) for n in (1, 2, 3)] == [1000, 3000, 9000]
    assert [backoff_ms(n, None, tasks, most_jitter) for n in (1, 2, 3)] == [1249, 3749, 11249]
    assert backoff_ms(1, BackoffSpec.fixed(1000, 10), tasks, most_jitter) == 1009  # the job's own jitter is all


any_float = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e308, -1e308, -2.0, 5e-324])


@given(
    st.integers(0, MAX_U32 + 1) | st.integers(1, 40),
    st.sampled_from(["fixed", "exponential", "linear"]),
    st.integers(0, MAX_U64) | st.integers(0, 1000),
    st.none() | st.integers(0, MAX_U64),
    st.none() | any_float,
    st.none() | st.integers(0, MAX_U64),
)
@examples(150)
def test_any_delay_from_the_wire_is_between_0_and_cap_plus_jitter(
    n: int, kind: str, delay_ms: int, max_delay_ms: int | None, multiplier: float | None, jitter_ms: int | None
) -> None:
    spec = read_backoff(WireBackoff(kind, delay_ms, max_delay_ms, multiplier, jitter_ms))
    cap = DEFAULTS.max_backoff_ms if max_delay_ms is None else max_delay_ms
    jitter = DEFAULTS.jitter_ms if jitter_ms is None else jitter_ms
    least = backoff_ms(n, spec, DEFAULTS, no_jitter)
    assert 0 <= least <= cap
    assert backoff_ms(n, spec, DEFAULTS, most_jitter) == least + max(jitter - 1, 0)


def test_an_int_multiplier_with_a_huge_attempt_is_computed_at_once() -> None:
    # As an int, 2 ** 4294967295 would take half a gigabyte.
    assert backoff_ms(MAX_U32, None, RetryConfig(multiplier=2), no_jitter) == 30_000
    assert isinstance(RetryConfig(multiplier=2).multiplier, float)


BAD: list[tuple[Any, str, str]] = [
    (lambda: BackoffSpec("linear", 5), "backoff.kind must be 'fixed' or 'exponential'", "'linear'"),
    (lambda: BackoffSpec("Fixed", 5), "backoff.kind must be 'fixed' or 'exponential'", "'Fixed'"),
    (lambda: BackoffSpec.fixed(-1), "backoff.delay_ms must be a whole number", "-1"),
    (lambda: BackoffSpec.fixed(1.5), "backoff.delay_ms must be a whole number", "1.5"),
    (lambda: BackoffSpec.fixed(True), "backoff.delay_ms must be a whole number", "True"),
    (lambda: BackoffSpec.fixed(5, -1), "backoff.jitter_ms must be a whole number", "-1"),
    (lambda: BackoffSpec.fixed(2**64), "backoff.delay_ms must be a whole number", "18446744073709551616"),
    (lambda: BackoffSpec.exponential(5, max_ms=-1), "backoff.max_delay_ms must be", "-1"),
    (lambda: BackoffSpec.exponential(5, multiplier=math.nan), "backoff.multiplier must be a finite number", "nan"),
    (lambda: BackoffSpec.exponential(5, multiplier=math.inf), "backoff.multiplier must be a finite number", "inf"),
    (lambda: BackoffSpec.exponential(5, multiplier=-2.0), "backoff.multiplier must be a finite number", "-2.0"),
    (lambda: BackoffSpec.exponential(5, multiplier="2"), "backoff.multiplier must be a finite number", "'2'"),
    (lambda: JobRetryOverride(-1), "retry.max_attempts must be a whole number from 0", "-1"),
    (lambda: JobRetryOverride(2**32), "retry.max_attempts must be a whole number from 0 to 4294967295", "4294967296"),
    (lambda: JobRetryOverride(True), "retry.max_attempts must be a whole number", "True"),
    (lambda: JobRetryOverride(3, 500), "retry.backoff must be a BackoffSpec", "500"),
    (lambda: RetryConfig(initial_backoff_ms=-1), "retry.initial_backoff_ms must be", "-1"),
    (lambda: RetryConfig(max_backoff_ms=1.5), "retry.max_backoff_ms must be", "1.5"),
    (lambda: RetryConfig(multiplier=math.nan), "retry.multiplier must be", "nan"),
    (lambda: RetryConfig(jitter_ms=None), "retry.jitter_ms must be", "None"),
    (lambda: RetryConfig(jitter_ratio=-0.1), "retry.jitter_ratio must be", "-0.1"),
]


@pytest.mark.parametrize(("make", "says", "value"), BAD, ids=[f"{says} {value}"[:50] for _, says, value in BAD])
def test_what_makes_no_sense_is_refused(make: Any, says: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refusal:
        make()
    assert str(refusal.value).endswith(f"got {value}")
    assert refusal.value.code == "CMQ-004"


@pytest.mark.parametrize(
    "vector", [v for v in vectors("cmq_captures.json", "refusals") if "retry" in v.values[0]["name"]]
)
def test_retries_that_1_3_0_rejects_are_rejected(vector: dict[str, Any]) -> None:
    options = ast.literal_eval(vector["input"]["opts"])
    with pytest.raises(ConfigError):
        JobRetryOverride(options.get("attempts"), BackoffSpec(**options["backoff"]) if "backoff" in options else None)


def test_a_negative_multiplier_of_1_3_0_is_read_but_never_written() -> None:
    entries = [e for e in load("cmq_captures.json")["job_entries"] if e["from"] == "retry_multiplier_negative"]
    job = decode_job(bytes.fromhex(entries[0]["fields_hex"][1]))
    assert job.retry is not None
    assert job.retry.backoff == read_backoff(WireBackoff("exponential", 100, None, -2.0, None))
    assert (
        encode_envelope(job.id, job.payload_slot, job.created_at_ms, 0, job.retry).hex() == entries[0]["fields_hex"][1]
    )
    assert [backoff_ms(n, job.retry.backoff, DEFAULTS, no_jitter) for n in (1, 2, 3)] == [100, 0, 400]
