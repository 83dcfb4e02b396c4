"""The job envelope: encoded byte for byte as by ChasquiMQ 1.3.0; decoding accepts what 1.3.0 accepts, and more."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.errors import DecodeError, EncodeError
from tampu.wire import QueueKeys, decode_job, encode_job
from tampu.wire.entry import job_fields, read_job_fields
from tampu.wire.envelope import encode_envelope
from tampu.wire.job import Job
from tampu.wire.payload import decode_value, wrap_bin
from tampu.wire.retry import BackoffKind, BackoffSpec, JobRetryOverride

from .strategies import examples, jobs
from .vectors import load, unhex, vectors


def packed(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True, datetime=True)


def retry_of(form: Any) -> JobRetryOverride | None:
    """Parse an override of the vectors."""
    if form == "ABSENT":
        return None
    max_attempts, backoff = form
    return JobRetryOverride(max_attempts, None if backoff is None else BackoffSpec(*backoff))


# --- what 1.3.0 wrote ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("codec.json", "job_envelope"))
def test_a_captured_envelope_is_written_and_read(vector: dict[str, Any]) -> None:
    data, inner = bytes.fromhex(vector["d_hex"]), bytes.fromhex(vector["payload_hex"])
    retry = retry_of(vector["retry"])
    job = decode_job(data)
    assert (job.id, job.created_at_ms, job.attempt) == (vector["id"], vector["created_at_ms"], vector["attempt"])
    assert job.retry == retry
    assert job.payload_slot == wrap_bin(inner)
    assert job.payload_format == "bin"
    assert encode_job(job) == data
    assert encode_envelope(job.id, wrap_bin(inner), job.created_at_ms, job.attempt, retry) == data
    if vector["from"] == "native_raw_bytes":  # bytes that are no MessagePack travel, and only reading them fails
        with pytest.raises(DecodeError):
            _ = job.payload
    else:
        made = Job(job.id, "", decode_value(inner), job.attempt, job.created_at_ms, retry=retry)
        assert encode_job(made) == data
        assert made == job


@pytest.mark.parametrize("vector", vectors("codec.json", "xadd_immediate"))
def test_a_captured_xadd_is_written_and_read(vector: dict[str, Any]) -> None:
    arguments = unhex(vector["args_hex"])
    command, key, _idmp, _producer, iid, _maxlen, _about, _cap, star, *fields = arguments
    queue_name = key.decode().removeprefix("{chasqui:").removesuffix("}:stream")
    assert (command, star) == (b"XADD", b"*")
    assert QueueKeys(queue_name).stream.encode() == key
    data, name = read_job_fields(fields)
    assert data is not None
    job = decode_job(data, name)
    assert job.id.encode() == iid
    assert job_fields(encode_job(job), job.name) == fields


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "job_entries"))
def test_a_captured_stream_entry_is_read_and_written(vector: dict[str, Any]) -> None:
    fields = unhex(vector["fields_hex"])
    data, name = read_job_fields(fields)
    assert data is not None
    assert job_fields(encode_job(decode_job(data, name)), name) == fields


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "replays"))
def test_a_replayed_dead_letter_is_the_envelope_with_attempt_0(vector: dict[str, Any]) -> None:
    dead = {peek["returned"]["dlq_id"]: peek["returned"] for peek in load("cmq_captures.json")["peeks"]}
    letter = dead[vector["dlq_id"]]
    assert encode_job(decode_job(bytes.fromhex(letter["payload"])).with_attempt(0)).hex() == vector["d_hex"]


# --- what 1.3.0 reads ------------------------------------------------------------------------------------------------

INLINE = "1.3.0's Python worker reads only payloads in a bin; tampu also reads inline ones"
OCTETS = "1.3.0 reads an inline array of numbers as bytes; tampu reads a list, because its inline lists must survive"
INT_KEY = "1.3.0's worker rejects keys that are not text; tampu reads every key that both can write"

#: Vectors that tampu does not follow, why, and the payload that it reads.
EXCEPTIONS: dict[str, tuple[str, Any]] = {
    "decode_payload_inline_int": (INLINE, 1),
    "decode_payload_inline_map": (INLINE, {"a": 1}),
    "decode_payload_inline_nil": (INLINE, None),
    "decode_payload_inline_list_u8": (OCTETS, [1]),
    "decode_payload_int_key_map": (INT_KEY, {1: 2}),
    "payload_str": (INLINE, "\x01"),
    "payload_list_300": (INLINE, [300]),
    "payload_list_bool": (INLINE, [True]),
    "payload_ext": (INLINE, ...),  # has no plain value
}


def reads_as(data: bytes, *, envelope: bool, payload: bool) -> Job[Any] | None:
    if not envelope:
        with pytest.raises(DecodeError, match=r"^not a job envelope: "):
            decode_job(data)
        return None
    job = decode_job(data)
    if not payload:
        with pytest.raises(DecodeError):
            _ = job.payload
    return job


@pytest.mark.parametrize("vector", vectors("cmq_decode_acceptance.json", but=EXCEPTIONS))
def test_an_envelope_is_accepted_or_refused_as_by_1_3_0(vector: dict[str, Any]) -> None:
    # Where the worker had to run it to find out that the payload cannot be read, reading the payload must fail.
    reasons = {entry["reason"] for entry in vector["dlq"]}
    job = reads_as(
        bytes.fromhex(vector["input"]["d_hex"]), envelope="decode_failed" not in reasons, payload=vector["accepted"]
    )
    for seen in vector["handler_saw"]:
        assert job is not None
        assert (job.id, job.attempt, job.created_at_ms) == (seen["id"], seen["attempt"], seen["created_at_ms"])
        if vector["name"] == "decode_payload_ext_ts":  # msgpack.Timestamp there, a datetime here
            assert job.payload == datetime.fromtimestamp(1600000000, UTC)
        else:
            assert repr(job.payload) == seen["data"]


@pytest.mark.parametrize("vector", vectors("cmq_acceptance_more.json", "envelopes", but=EXCEPTIONS))
def test_an_envelope_in_a_rarer_form_is_accepted_or_refused_as_by_1_3_0(vector: dict[str, Any]) -> None:
    job = reads_as(
        bytes.fromhex(vector["d_hex"]), envelope=vector.get("dlq") != "decode_failed", payload=vector["accepted"]
    )
    if vector["accepted"]:
        assert job is not None
        assert (job.id, job.attempt, job.created_at_ms) == (vector["id"], vector["attempt"], vector["created_at_ms"])
        assert job.payload == 1


@pytest.mark.parametrize(
    "vector",
    [
        *vectors("cmq_decode_acceptance.json", only=EXCEPTIONS),
        *vectors("cmq_acceptance_more.json", "envelopes", only=EXCEPTIONS),
    ],
)
def test_the_exceptions_read_as_the_table_says(vector: dict[str, Any]) -> None:
    _reason, payload = EXCEPTIONS[vector["name"]]
    data = bytes.fromhex(vector["d_hex"] if "d_hex" in vector else vector["input"]["d_hex"])
    job = decode_job(data)
    assert payload is ... or job.payload == payload
    assert decode_job(encode_job(job)) == job


def test_every_exception_is_a_vector() -> None:
    known = {vector["name"] for vector in load("cmq_decode_acceptance.json")}
    known |= {vector["name"] for vector in load("cmq_acceptance_more.json")["envelopes"]}
    assert known >= EXCEPTIONS.keys()


# --- what must hold for any job --------------------------------------------------------------------------------------


@given(jobs())
@examples(80)
def test_any_job_comes_back(job: Job[Any]) -> None:
    data = encode_job(job)
    back = decode_job(data, job.name)
    assert back == job
    assert back.payload == job.payload
    assert back.payload_format == job.payload_format
    assert encode_job(back) == data


@given(jobs())
@examples(50)
def test_envelopes_are_those_of_msgpack_python(job: Job[Any]) -> None:
    payload = packed(job.payload) if job.payload_format == "bin" else job.payload
    slots: list[Any] = [job.id, payload, job.created_at_ms, job.attempt]
    if job.retry is not None:
        backoff = job.retry.backoff
        form = backoff and [
            str(backoff.kind),
            backoff.delay_ms,
            backoff.max_delay_ms,
            backoff.multiplier,
            backoff.jitter_ms,
        ]
        slots.append([job.retry.max_attempts, form])
    assert encode_job(job) == packed(slots)


@given(jobs(), st.binary(max_size=5))
@examples(40)
def test_bytes_behind_an_envelope_are_ignored(job: Job[Any], tail: bytes) -> None:
    assert decode_job(encode_job(job) + tail, job.name) == job


@given(jobs(), st.randoms(use_true_random=False))
@examples(40)
def test_a_map_in_any_order_reads_as_the_array(job: Job[Any], shuffler: Any) -> None:
    slots = dict(
        zip(("id", "payload", "created_at_ms", "attempt", "retry"), msgpack_slots(encode_job(job)), strict=False)
    )
    pairs = [packed(name) + slot for name, slot in slots.items()]
    pairs.append(packed("from the future") + packed([1, {"x": None}]))
    shuffler.shuffle(pairs)
    assert decode_job(bytes([0x80 + len(pairs)]) + b"".join(pairs), job.name) == job


def msgpack_slots(data: bytes) -> list[bytes]:
    """Return an array's slots, split by msgpack-python."""
    unpacker = msgpack.Unpacker(raw=True, strict_map_key=False)
    unpacker.feed(data)
    slots = []
    for _ in range(unpacker.read_array_header()):
        start = unpacker.tell()
        unpacker.skip()
        slots.append(data[start : unpacker.tell()])
    return slots


# --- corners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slot", [wrap_bin(b""), wrap_bin(b"\xc1"), wrap_bin(b"\x93\x01"), b"\x91\xa1\xff", b"\x81\x80\x01"]
)
def test_a_payload_slot_that_holds_garbage_fails_only_when_it_is_read(slot: bytes) -> None:
    data = encode_envelope("a", slot, 5, 1)
    job = decode_job(data)
    assert (job.id, job.created_at_ms, job.attempt, job.payload_slot) == ("a", 5, 1, slot)
    assert encode_job(job.with_attempt(2)) == encode_envelope("a", slot, 5, 2)
    with pytest.raises(DecodeError):
        _ = job.payload


def test_a_deeply_nested_payload_travels_and_only_reading_it_fails() -> None:
    slot = wrap_bin(b"\x91" * 100_000 + b"\xc0")
    job = decode_job(encode_envelope("a", slot, 5))
    assert job.payload_slot == slot
    with pytest.raises(DecodeError, match="nested too deeply"):
        _ = job.payload
    with pytest.raises(DecodeError, match="nested too deeply"):
        decode_job(encode_envelope("a", b"\x91" * 100_000 + b"\xc0", 5))  # inline, its end is found by its levels


def test_an_override_our_constructor_would_refuse_is_read_kept_and_written() -> None:
    for multiplier in (-2.0, math.inf, -math.inf, math.nan):
        data = packed(["a", b"\x01", 5, 0, [None, ["exponential", 100, None, multiplier, 0]]])
        job = decode_job(data)
        assert job.retry is not None
        assert job.retry.backoff is not None
        assert repr(job.retry.backoff.multiplier) == repr(multiplier)
        assert encode_job(job) == data


def test_a_backoff_of_an_unknown_kind_is_kept_as_unknown() -> None:
    job = decode_job(packed(["a", b"\x01", 5, 0, [3, ["linear", 5, None, None, None]]]))
    assert job.retry == JobRetryOverride(3, BackoffSpec(BackoffKind.UNKNOWN, 5))


def test_a_whole_multiplier_is_written_as_a_float() -> None:
    job = decode_job(packed(["a", b"\x01", 5, 0, [3, ["exponential", 5, None, 2, None]]]))
    assert encode_job(job) == packed(["a", b"\x01", 5, 0, [3, ["exponential", 5, None, 2.0, None]]])
    made = Job("a", "", 1, 0, 5, retry=JobRetryOverride(3, BackoffSpec("exponential", 5, multiplier=2)))  # type: ignore[arg-type]  # a plain str does too
    assert encode_job(made) == encode_job(job)


def test_a_retry_map_may_lack_fields() -> None:
    for form, expected in [
        ({}, JobRetryOverride()),
        ({"max_attempts": 3}, JobRetryOverride(3)),
        ({"backoff": {"kind": "fixed", "delay_ms": 5}}, JobRetryOverride(None, BackoffSpec.fixed(5))),
        ({"backoff": ["fixed", 5, None, None, None]}, JobRetryOverride(None, BackoffSpec.fixed(5))),
    ]:
        assert decode_job(packed(["a", b"\x01", 5, 0, form])).retry == expected


def test_ids_1_3_0_takes_are_read_though_we_would_not_make_them() -> None:
    for job_id in ("", " ", "a\x00b"):
        data = packed([job_id, b"\x01", 5, 0])
        assert decode_job(data).id == job_id
        assert encode_job(decode_job(data)) == data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "array or map"),
        (packed("x"), "array or map"),
        (packed(["a", b"\x01"]), "array of 3 to 5 values; got 2"),
        (packed({"id": "a"}), "missing fields: payload, created_at_ms"),
        (packed(["a", b"\x01", 1.5]), "got `float`"),
        (packed(["a", b"\x01", 5, 2**32]), "4294967295"),
        (packed(["a", b"\x01", 5, 0, [1, ["fixed", -1, None, None, None]]]), "Expected `int` >= 0"),
        (packed(["a", b"\x01", 5, 0])[:-1], "ends after|claims"),
    ],
)
def test_a_refusal_says_what_is_wrong(data: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why) as error:
        decode_job(data)
    assert error.value.code == "CMQ-003"


def test_what_cannot_be_encoded_is_an_encode_error() -> None:
    for job_id, created_at_ms in (("\ud800", 0), ("a", 2**64), ("a", 2**70)):
        with pytest.raises(EncodeError):
            encode_envelope(job_id, b"\xc0", created_at_ms)
