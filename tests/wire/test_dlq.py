"""Dead letters, compared with those of ChasquiMQ 1.3.0."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.errors import EncodeError
from tampu.wire import decode_dlq_fields, encode_dlq_fields
from tampu.wire.dlq import DlqEntry, DlqReason

from .strategies import dead_letters, examples
from .vectors import unhex, vectors


@pytest.mark.parametrize("vector", vectors("codec.json", "dlq_entries"))
def test_a_captured_dead_letter_is_read_and_written(vector: dict[str, Any]) -> None:
    values = {field: bytes.fromhex(value) for field, value in vector["fields_hex"]}
    fields = [part for field, value in values.items() for part in (field.encode(), value)]
    entry = decode_dlq_fields(vector["stream_id"], fields)
    assert entry.dlq_id == vector["stream_id"]
    assert entry.payload == values["d"]
    assert entry.name == values.get("n", b"").decode()
    assert entry.source_id == values["source_id"].decode()
    assert DlqReason(entry.reason).as_str() == values["reason"].decode()
    assert entry.detail == (values["detail"].decode() if "detail" in values else None)
    assert encode_dlq_fields(entry) == fields


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "dlq_entries"))
def test_every_other_dead_letter_seen_is_read_and_written(vector: dict[str, Any]) -> None:
    fields = unhex(vector["fields_hex"])
    assert encode_dlq_fields(decode_dlq_fields(vector["id"], fields)) == fields


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "peeks"))
def test_peeking_returns_what_1_3_0_returns(vector: dict[str, Any]) -> None:
    told = vector["returned"]
    entry = decode_dlq_fields(told["dlq_id"], unhex(vector["fields_hex"]))
    assert {name: getattr(entry, name) for name in told} == told | {"payload": bytes.fromhex(told["payload"])}


@given(dead_letters)
@examples(80)
def test_any_dead_letter_comes_back(entry: DlqEntry) -> None:
    assert decode_dlq_fields("1-0", encode_dlq_fields(entry)) == entry


@given(dead_letters)
@examples(30)
def test_tampus_fields_follow_the_fields_of_the_wire_format(entry: DlqEntry) -> None:
    names = encode_dlq_fields(entry)[::2]
    wire = [b"d", *([b"n"] if entry.name else []), b"source_id", b"reason"]
    if entry.detail is not None:
        wire.append(b"detail")
    assert names[: len(wire)] == wire
    assert len(set(names)) == len(names)


def test_reasons_have_their_codes_and_only_malformed_a_detail() -> None:
    assert {reason.value: reason.code for reason in DlqReason} == {
        "retries_exhausted": "CMQ-020",
        "decode_failed": "CMQ-021",
        "malformed": "CMQ-022",
        "oversize_payload": "CMQ-023",
        "unrecoverable": "CMQ-024",
        "expired": "CMQ-025",
    }
    details = {reason: reason.detail() for reason in DlqReason if reason.detail() is not None}
    assert details == {DlqReason.MALFORMED: "missing or non-bytes payload field"}


@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"d", b"n", b"original", b"attempts", b"ts"]), max_size=12))
@examples(80)
def test_peeking_never_fails(fields: list[bytes]) -> None:
    decode_dlq_fields("1-0", fields)


def test_unreadable_fields_are_left_out() -> None:
    entry = decode_dlq_fields(
        "1-0",
        [b"d", b"x", b"n", b"\xff", b"attempts", b"many", b"ts", b"9" * 21, b"original", b"\xc1", b"reason", b"\xff"],
    )
    assert (entry.name, entry.attempts, entry.failed_at_ms, entry.original) == ("", None, None, None)
    assert entry.reason == "\ufffd"
    for original in (b"\x01", b"\x91\xc4\x00", b"\x92\x01\x02", b"\x91" * 100_000):
        assert decode_dlq_fields("1-0", [b"original", original]).original is None


def test_texts_lose_what_utf8_cannot_carry_but_names_and_ids_are_refused() -> None:
    entry = DlqEntry(
        dlq_id="1-0", source_id="1-1", reason="malformed", detail="a\ud800", error="\udfff", worker="\ud800"
    )
    fields = encode_dlq_fields(entry)
    assert [fields[fields.index(name) + 1] for name in (b"detail", b"error", b"worker")] == [b"a?", b"?", b"?"]
    for field in ("name", "source_id", "reason"):
        bad = DlqEntry(**{"dlq_id": "1-0", "source_id": "1-1", "reason": "malformed"} | {field: "x\ud800"})  # type: ignore[arg-type]  # a dict of texts
        with pytest.raises(EncodeError, match=field):
            encode_dlq_fields(bad)
