"""Repeatable specs as producers create them: keys, copies, and what is rejected."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from tampu.errors import ConfigError, EncodeError
from tampu.wire.repeat import MissedFiresPolicy, RepeatableSpec, RepeatPattern

from .vectors import vectors

EVERY = RepeatPattern.every(5000)


def test_a_key_is_made_of_the_name_and_the_pattern() -> None:
    assert RepeatableSpec("tick", EVERY, None).resolved_key() == "tick::every:5000"
    assert RepeatableSpec("", RepeatPattern.every(60000), None).resolved_key() == "::every:60000"
    cron = RepeatPattern.cron("*/5 * * * *")
    assert RepeatableSpec("c", cron, None).resolved_key() == "c::cron:*/5 * * * *:UTC"
    lima = RepeatPattern.cron("0 2 * * *", tz="America/Lima")
    assert RepeatableSpec("c", lima, None).resolved_key() == "c::cron:0 2 * * *:America/Lima"
    assert RepeatPattern.cron("0 2 * * *", tz="").signature() == "cron:0 2 * * *:"
    assert RepeatableSpec("c", lima, None).with_key("my-key").resolved_key() == "my-key"


def test_a_spec_is_built_step_by_step() -> None:
    spec = (
        RepeatableSpec("tick", EVERY, {"x": 1})
        .with_key("k")
        .with_limit(3)
        .with_start_after_ms(10)
        .with_end_before_ms(20)
        .with_missed_fires(MissedFiresPolicy.fire_all(2))
    )
    stored = spec.stored()
    assert (stored.key, stored.job_name, stored.pattern, stored.payload) == ("k", "tick", EVERY, {"x": 1})
    assert (stored.limit, stored.start_after_ms, stored.end_before_ms) == (3, 10, 20)
    meta = stored.meta(77)
    assert (meta.key, meta.next_fire_ms, meta.limit, meta.missed_fires.max_catchup) == ("k", 77, 3, 2)
    assert not hasattr(meta, "payload")


def test_the_next_fire_of_every_is_one_interval_later() -> None:
    assert EVERY.next_fire_ms(1_000) == 6_000


def spec(**changes: Any) -> RepeatableSpec[Any]:
    return RepeatableSpec(**{"job_name": "n", "pattern": EVERY, "payload": None} | changes)  # type: ignore[arg-type]  # wrong on purpose


BAD: list[tuple[Any, str, str]] = [
    (lambda: RepeatPattern.every(0), "pattern.interval_ms must be a whole number", "0"),
    (lambda: RepeatPattern.every(-5), "pattern.interval_ms must be a whole number", "-5"),
    (lambda: RepeatPattern.every(1.5), "pattern.interval_ms must be a whole number", "1.5"),
    (lambda: RepeatPattern.every(True), "pattern.interval_ms must be a whole number", "True"),
    (lambda: RepeatPattern("weekly"), "pattern.kind must be 'cron' or 'every'", "'weekly'"),
    (
        lambda: RepeatPattern("every", interval_ms=5, tz="UTC"),
        "pattern.expression and tz must be None in an 'every' pattern",
        "'UTC'",
    ),
    (
        lambda: RepeatPattern("cron", "* * * * *", interval_ms=5),
        "pattern.interval_ms must be None in a cron pattern",
        "5",
    ),
    (lambda: RepeatPattern.cron(7), "pattern.expression must be a str", "7"),
    (lambda: RepeatPattern.cron("  "), "pattern.expression must be text that is not blank", "'  '"),
    (lambda: RepeatPattern.cron("* * * * *", tz=5), "pattern.tz must be a str", "5"),
    (lambda: RepeatPattern.cron("* * * * *", tz="U\x00TC"), "pattern.tz must be text without NUL", "'U\\x00TC'"),
    (lambda: MissedFiresPolicy.fire_all(0), "missed_fires.max_catchup must be a whole number from 1", "0"),
    (lambda: MissedFiresPolicy.fire_all(2**32), "missed_fires.max_catchup must be a whole number from 1", "4294967296"),
    (lambda: MissedFiresPolicy("skip", 3), "missed_fires.max_catchup must be None for 'skip'", "3"),
    (lambda: MissedFiresPolicy("later"), "missed_fires.kind must be 'skip', 'fire-once' or 'fire-all'", "'later'"),
    (lambda: spec(job_name="n" * 257), "job_name must be at most 256 bytes", "'nnn"),
    (lambda: spec(job_name=None), "job_name must be a str", "None"),
    (lambda: spec(key="a\x00"), "key must be text without NUL", "'a\\x00'"),
    (lambda: spec(limit=-1), "limit must be a whole number", "-1"),
    (lambda: spec(limit=True), "limit must be a whole number", "True"),
    (lambda: spec(start_after_ms=1.5), "start_after_ms must be a whole number", "1.5"),
    (lambda: spec(end_before_ms=float("nan")), "end_before_ms must be a whole number", "nan"),
    (lambda: spec(pattern="* * * * *"), "pattern must be a RepeatPattern", "'* * * * *'"),
    (lambda: spec(missed_fires="skip"), "missed_fires must be a MissedFiresPolicy", "'skip'"),
]


@pytest.mark.parametrize(("make", "says", "value"), BAD, ids=[f"{says} {value}"[:50] for _, says, value in BAD])
def test_what_makes_no_sense_is_refused(make: Any, says: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refusal:
        make()
    assert value in str(refusal.value)
    assert refusal.value.code == "CMQ-004"


@pytest.mark.parametrize(
    "vector", [v for v in vectors("cmq_captures.json", "refusals") if v.values[0]["name"].startswith("rep_")]
)
def test_patterns_that_1_3_0_rejects_are_rejected(vector: dict[str, Any]) -> None:
    makes = {
        "rep_every_0": lambda: RepeatPattern.every(0),
        "rep_every_neg": lambda: RepeatPattern.every(-5),
        "rep_bad_tz": lambda: RepeatPattern.cron("0 0 * * *", tz="Mars/Olympus"),
        "rep_bad_cron": lambda: RepeatPattern.cron("61 * * * *"),
    }
    with pytest.raises(ConfigError):
        makes[vector["name"]]()


def test_a_payload_without_a_faithful_form_makes_no_spec_to_store() -> None:
    with pytest.raises(EncodeError):
        spec(payload={1, 2}).stored()
    assert ast.literal_eval(repr(spec(payload=(1, 2)).stored().payload)) == [1, 2]
