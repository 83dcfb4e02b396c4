"""The names of a queue's keys, compared with those of ChasquiMQ 1.3.0."""

from __future__ import annotations

from typing import Any

import pytest

from tampu.errors import ConfigError
from tampu.wire import QueueKeys

from .vectors import vectors


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "keys"))
def test_a_key_is_named_as_the_captured_one(vector: dict[str, Any]) -> None:
    keys = QueueKeys(vector["queue"])
    named = {
        "stream": lambda: keys.stream,
        "delayed": lambda: keys.delayed,
        "dlq": lambda: keys.dlq,
        "events": lambda: keys.events,
        "repeat": lambda: keys.repeat,
        "promoter:lock": lambda: keys.promoter_lock,
        "scheduler:lock": lambda: keys.scheduler_lock,
        "dlid": lambda: keys.dedup_marker(vector["of"]),
        "didx": lambda: keys.delayed_index(vector["of"]),
        "result": lambda: keys.result(vector["of"]),
        "repeat:spec": lambda: keys.repeat_spec(vector["of"]),
    }
    assert named[vector["role"]]() == vector["key"]


def test_every_key_of_a_queue_has_its_hash_tag_and_no_two_are_the_same() -> None:
    keys = QueueKeys("emails")
    fixed = [getattr(keys, slot) for slot in vars(keys) if slot not in ("queue_name", "tag")]
    made = [make("x") for make in (keys.dedup_marker, keys.delayed_index, keys.result, keys.repeat_spec, keys.chain)]
    everything = fixed + made
    assert all(key.startswith("{chasqui:emails}:") for key in everything)
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("name", ["", "  ", "a\x00b", "we ird}:é", "{x", 7, None, b"emails", "\ud800"])
def test_a_queue_name_that_would_break_its_keys_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="queue_name must be") as refusal:
        QueueKeys(name)
    assert repr(name) in str(refusal.value)


def test_blanks_and_other_alphabets_in_a_queue_name_are_fine() -> None:
    assert QueueKeys("we ird é").stream == "{chasqui:we ird é}:stream"
