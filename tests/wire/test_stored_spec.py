"""Stored repeatable specs: encoded byte for byte as by ChasquiMQ 1.3.0, and decoded as by 1.3.0."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given

from tampu.errors import DecodeError, EncodeError
from tampu.wire import QueueKeys, decode_job, decode_spec, encode_spec
from tampu.wire.envelope import encode_envelope
from tampu.wire.payload import decode_slot
from tampu.wire.repeat import MissedFiresPolicy, RepeatableSpec, RepeatPattern, StoredSpec

from .strategies import examples, specs
from .vectors import load, vectors


def packed(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def pattern_of(form: dict[str, Any]) -> RepeatPattern:
    if "Every" in form:
        return RepeatPattern.every(*form["Every"])
    expression, tz = form["Cron"]
    return RepeatPattern.cron(expression, tz=tz)


def policy_of(form: Any) -> MissedFiresPolicy:
    if isinstance(form, dict):
        return MissedFiresPolicy.fire_all(*form["FireAll"])
    return MissedFiresPolicy.fire_once() if form == "FireOnce" else MissedFiresPolicy.skip()


# --- what 1.3.0 wrote ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("codec.json", "stored_spec"))
def test_a_captured_spec_is_written_and_read(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["spec_hex"])
    expected = StoredSpec(
        key=vector["key"],
        job_name=vector["job_name"],
        pattern=pattern_of(vector["pattern"]),
        payload_slot=bytes.fromhex(vector["payload_bin_hex"]),
        limit=vector["limit"],
        start_after_ms=vector["start_after_ms"],
        end_before_ms=vector["end_before_ms"],
        missed_fires=policy_of(vector["missed_fires"]),
    )
    assert decode_spec(data) == expected
    assert encode_spec(expected) == data
    assert encode_spec(decode_spec(data)) == data


@pytest.mark.parametrize("vector", [v for v in vectors("codec.json", "stored_spec") if "long_name" not in str(v.id)])
def test_a_spec_made_from_its_parts_has_the_captured_key_and_bytes(vector: dict[str, Any]) -> None:
    # One vector is left out: its name of 300 bytes, which 1.3.0 does not check on this path, is rejected by tampu.
    spec = RepeatableSpec(
        vector["job_name"],
        pattern_of(vector["pattern"]),
        decode_slot(bytes.fromhex(vector["payload_bin_hex"])),
        key="my-key" if vector["from"] == "rep_explicit_key" else "",
        limit=vector["limit"],
        start_after_ms=vector["start_after_ms"],
        end_before_ms=vector["end_before_ms"],
        missed_fires=policy_of(vector["missed_fires"]),
    )
    assert spec.resolved_key() == vector["key"]
    assert encode_spec(spec.stored()).hex() == vector["spec_hex"]


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "stored_specs"))
def test_every_spec_seen_is_read_and_written_and_lies_under_its_key(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["spec_hex"])
    spec = decode_spec(data)
    assert encode_spec(spec) == data
    assert QueueKeys("gr").repeat_spec(spec.key) == vector["key"]


# --- what 1.3.0 reads ------------------------------------------------------------------------------------------------

INLINE = "1.3.0's Python worker reads only payloads in a bin; tampu also reads inline ones"
OCTETS = "1.3.0 reads an inline array of numbers as bytes; tampu reads a list, because its inline lists must survive"
NO_VALUE = "1.3.0 reads the spec and fails to fire it at every tick; tampu rejects it"
OFFSET = "1.3.0 does not check the minutes of an offset"

#: Vectors that tampu does not follow, why, and the payload that it reads (or DecodeError).
EXCEPTIONS: dict[str, tuple[str, Any]] = {
    "payload_inline": (INLINE, 1),
    "payload_list_inner": (OCTETS, [1]),
    "payload_empty": (NO_VALUE, DecodeError),
    "payload_truncated": (NO_VALUE, DecodeError),
    "cron_tz_0575": (OFFSET, DecodeError),
}


def reads_as(data: bytes, *, spec: bool) -> None:
    if not spec:
        with pytest.raises(DecodeError, match=r"^not a repeatable spec: "):
            decode_spec(data)
        return
    stored = decode_spec(data)
    assert stored.payload == 1
    assert decode_spec(encode_spec(stored)) == stored


@pytest.mark.parametrize("vector", vectors("cmq_stored_spec_acceptance.json"))
def test_a_spec_is_accepted_or_refused_as_by_1_3_0(vector: dict[str, Any]) -> None:
    reads_as(bytes.fromhex(vector["spec_hex"]), spec=vector["fired"] == 1)


@pytest.mark.parametrize("vector", vectors("cmq_acceptance_more.json", "specs", but=EXCEPTIONS))
def test_a_spec_in_a_rarer_form_is_accepted_or_refused_as_by_1_3_0(vector: dict[str, Any]) -> None:
    assert vector["fired"] == vector["kept"]
    reads_as(bytes.fromhex(vector["spec_hex"]), spec=vector["fired"])


@pytest.mark.parametrize("vector", vectors("cmq_acceptance_more.json", "specs", only=EXCEPTIONS))
def test_the_exceptions_read_as_the_table_says(vector: dict[str, Any]) -> None:
    _reason, payload = EXCEPTIONS[vector["name"]]
    data = bytes.fromhex(vector["spec_hex"])
    if payload is DecodeError:
        with pytest.raises(DecodeError, match="not a repeatable spec"):
            decode_spec(data)
    else:
        assert decode_spec(data).payload == payload


def test_every_exception_is_a_vector() -> None:
    assert {vector["name"] for vector in load("cmq_acceptance_more.json")["specs"]} >= EXCEPTIONS.keys()


# --- what must hold for any spec -------------------------------------------------------------------------------------


@given(specs())
@examples(60)
def test_any_spec_comes_back(spec: StoredSpec) -> None:
    data = encode_spec(spec)
    assert decode_spec(data) == spec
    assert encode_spec(decode_spec(data)) == data
    assert decode_spec(data + b"tail") == spec


@given(specs())
@examples(40)
def test_specs_are_those_of_msgpack_python(spec: StoredSpec) -> None:
    pattern = spec.pattern
    slots: list[Any] = [
        spec.key,
        spec.job_name,
        {"Every": [pattern.interval_ms]} if pattern.kind == "every" else {"Cron": [pattern.expression, pattern.tz]},
        spec.payload_slot,
        spec.limit,
        spec.start_after_ms,
        spec.end_before_ms,
        0,
    ]
    policy = spec.missed_fires
    if policy.kind != "skip":
        slots.append("FireOnce" if policy.kind == "fire-once" else {"FireAll": [policy.max_catchup]})
    assert encode_spec(spec) == packed(slots)


@given(specs())
@examples(30)
def test_the_payload_of_a_spec_fits_into_an_envelope(spec: StoredSpec) -> None:
    """A fire copies the slot: a spec that can be read must never produce an envelope that cannot."""
    job = decode_job(encode_envelope("a", decode_spec(encode_spec(spec)).payload_slot, 5))
    assert (job.payload_slot, job.created_at_ms) == (spec.payload_slot, 5)


# --- corners ---------------------------------------------------------------------------------------------------------


def spec_with(**changes: Any) -> bytes:
    names = ("key", "name", "pattern", "payload", "limit", "start", "end", "fired")
    slots = dict(zip(names, ("k", "n", {"Every": [5]}, packed(b"\x01"), None, None, None, 0), strict=True))
    return packed(list((slots | changes).values()))


def test_bytes_behind_the_payload_of_a_spec_do_not_reach_the_envelope() -> None:
    spec = decode_spec(spec_with(payload=packed(b"\x01") + b"\x02\x03"))
    assert spec.payload_slot == b"\xc4\x01\x01"


def test_a_catch_up_of_0_is_read_and_written_though_ours_start_at_1() -> None:
    data = spec_with(missed={"FireAll": [0]})
    spec = decode_spec(data)
    assert (spec.missed_fires.kind, spec.missed_fires.max_catchup) == ("fire-all", 0)
    assert encode_spec(spec) == data


@pytest.mark.parametrize("tz", [None, "", "Z", "  ", "utc"])
def test_every_way_to_write_utc_is_kept_as_it_is(tz: str | None) -> None:
    data = spec_with(pattern={"Cron": ["0 9 * * *", tz]})
    assert decode_spec(data).pattern == RepeatPattern.cron("0 9 * * *", tz=tz)
    assert encode_spec(decode_spec(data)) == data


def test_a_name_of_300_bytes_of_1_3_0_is_read() -> None:
    assert len(decode_spec(spec_with(name="n" * 300)).job_name) == 300


@pytest.mark.parametrize("depth", [*range(300, 1000, 7), 10_000])
def test_a_nested_value_anywhere_in_a_spec_is_a_decode_error(depth: int) -> None:
    for slot in range(8):
        slots = [packed(part) for part in ("k", "n", {"Every": [5]}, packed(b"\x01"), None, None, None, 0)]
        slots[slot] = b"\x91" * depth + b"\xc0"
        with pytest.raises(DecodeError):
            decode_spec(b"\x98" + b"".join(slots))


def test_what_cannot_be_encoded_is_an_encode_error() -> None:
    sound = decode_spec(spec_with())
    for changes in ({"key": "\ud800"}, {"job_name": "\ud800"}, {"limit": 2**64}):
        bad = StoredSpec(
            **{"key": sound.key, "job_name": "n", "pattern": sound.pattern, "payload_slot": sound.payload_slot}
            | changes  # type: ignore[arg-type]  # a dict of parts
        )
        with pytest.raises(EncodeError):
            encode_spec(bad)
