"""Events, compared with those of ChasquiMQ 1.3.0."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.base.checks import MAX_U64
from tampu.errors import EncodeError
from tampu.wire import decode_event_fields, encode_event_fields
from tampu.wire.events import INTEGER_FIELDS, EventName

from .strategies import event_extras, examples, ids, names
from .vectors import vectors


@pytest.mark.parametrize("vector", vectors("codec.json", "event_entries"))
def test_a_captured_event_is_read_and_written(vector: dict[str, Any]) -> None:
    texts = dict(vector["fields"])
    fields = [part.encode() for pair in vector["fields"] for part in pair]
    event = decode_event_fields(fields)
    assert EventName(event.name) == texts["e"]
    assert event.job_id == (texts["id"] or None)
    assert event.job_name == texts.get("n", "")
    assert event.fields == {
        name: int(text) if name in INTEGER_FIELDS else text
        for name, text in texts.items()
        if name not in ("e", "id", "n")
    }
    extra = dict(event.fields)
    ts_ms = extra.pop("ts")
    assert isinstance(ts_ms, int)
    assert encode_event_fields(event.name, event.job_id or "", ts_ms, event.job_name, extra) == fields


@given(st.sampled_from(EventName), ids | st.just(""), st.integers(0, MAX_U64), names, event_extras)
@examples(80)
def test_any_event_comes_back(
    event: EventName, job_id: str, ts_ms: int, name: str, extra: dict[str, str | int]
) -> None:
    back = decode_event_fields(encode_event_fields(event, job_id, ts_ms, name, extra))
    assert (back.name, back.job_id, back.job_name) == (event, job_id or None, name)
    assert back.fields == {"ts": ts_ms, **extra}


@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"e", b"id", b"n", b"ts", b"attempt"]), max_size=12))
@examples(80)
def test_reading_an_event_never_fails(fields: list[bytes]) -> None:
    decode_event_fields(fields)


@pytest.mark.parametrize("text", [b"", b"-1", b"1.5", b"many", b"\xc2\xb2", "٣".encode(), b"9" * 21, b" 1", b"1_0"])
def test_an_invalid_number_is_kept_as_text(text: bytes) -> None:
    assert decode_event_fields([b"e", b"active", b"attempt", text]).fields == {"attempt": text.decode()}


def test_the_first_value_of_a_repeated_field_is_used() -> None:
    event = decode_event_fields([b"e", b"active", b"e", b"failed", b"attempt", b"1", b"attempt", b"2"])
    assert (event.name, event.fields) == ("active", {"attempt": 1})


def test_texts_lose_what_utf8_cannot_carry_but_names_and_ids_are_refused() -> None:
    fields = encode_event_fields("failed", "a", 1, "n", {"reason": "bad \ud800 text"})
    assert fields[-1] == b"bad ? text"
    for arguments in (
        ("\ud800", "a", 1, "n", {}),
        ("failed", "\ud800", 1, "n", {}),
        ("failed", "a", 1, "\ud800", {}),
        ("failed", "a", 1, "n", {"\ud800": 1}),
    ):
        with pytest.raises(EncodeError, match="cannot be encoded as UTF-8"):
            encode_event_fields(*arguments)
