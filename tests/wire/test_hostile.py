"""Hostile bytes: every decoder returns a value or raises `DecodeError`, in time and memory linear in the input."""

from __future__ import annotations

import contextlib
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.errors import DecodeError
from tampu.wire import (
    decode_delayed_member,
    decode_dlq_fields,
    decode_event_fields,
    decode_job,
    decode_result,
    decode_spec,
    encode_delayed_member,
    encode_job,
    encode_spec,
)
from tampu.wire.entry import read_job_fields
from tampu.wire.job import Job
from tampu.wire.payload import decode_slot
from tampu.wire.repeat import MissedFiresPolicy, RepeatableSpec, RepeatPattern
from tampu.wire.retry import BackoffSpec, JobRetryOverride, RetryConfig, backoff_ms
from tampu.wire.scan import end_of_value, slots_of
from tampu.wire.ulid import decode_ulid_time

from .strategies import damaged, examples, jobs, odd_messagepack, specs

if TYPE_CHECKING:
    from collections.abc import Callable


def read_job(data: bytes) -> None:
    """Decode a job and do everything that is done with a decoded job."""
    job = decode_job(data)
    assert decode_job(encode_job(job)) == job or has_nan(job)
    repr(job)
    hash(job)
    backoff = job.retry.backoff if job.retry else None
    backoff_ms(job.attempt + 1, backoff, RetryConfig(), lambda below: below - 1)
    _ = job.payload


def has_nan(job: Job[Any]) -> bool:
    """Return whether a job's multiplier is nan: such jobs are never equal."""
    backoff = job.retry.backoff if job.retry else None
    return backoff is not None and backoff.multiplier is not None and backoff.multiplier != backoff.multiplier


def read_spec(data: bytes) -> None:
    """Decode a spec and do everything that a scheduler does with it."""
    spec = decode_spec(data)
    assert decode_spec(encode_spec(spec)) == spec
    spec.pattern.next_fire_ms(1_794_770_000_000)
    _ = spec.payload


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "job": read_job,
    "spec": read_spec,
    "delayed member": decode_delayed_member,
    "delayed job": lambda data: decode_job(decode_delayed_member(data)[1]),
    "payload slot": decode_slot,
    "result": decode_result,
    "dead letter": lambda data: decode_dlq_fields(
        "1-0", [b"d", data, b"n", data, b"original", data, b"ts", data, data]
    ),
    "event": lambda data: decode_event_fields([b"e", data, b"id", data, b"attempt", data, data, data]),
    "stream entry": lambda data: read_job_fields([b"n", data, data, b"x", b"d", data]),
    "ulid": lambda data: decode_ulid_time(data.decode("latin-1")),
    "end of value": end_of_value,
    "slots": slots_of,
}


def survive(data: bytes) -> None:
    for decode in DECODERS.values():
        with contextlib.suppress(DecodeError):
            decode(data)


# --- any bytes -------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=120))
@examples(40)
def test_any_bytes_are_survived(data: bytes) -> None:
    survive(data)


@given(odd_messagepack)
@examples(50)
def test_odd_messagepack_is_survived(data: bytes) -> None:
    survive(data)


@given(damaged(jobs().map(encode_job)))
@examples(40)
def test_damaged_envelopes_are_survived(data: bytes) -> None:
    survive(data)


@given(damaged(specs().map(encode_spec)))
@examples(40)
def test_damaged_specs_are_survived(data: bytes) -> None:
    survive(data)


@given(damaged(jobs().map(lambda job: encode_delayed_member(job.name, encode_job(job)))))
@examples(30)
def test_damaged_delayed_members_are_survived(data: bytes) -> None:
    survive(data)


def packed(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


SOUND = {
    "plain job": encode_job(Job("01M7GA6SF90W0P6H8NHCB3RCZJ", "", {"to": "ada"}, 0, 1794770167273)),
    "job with all": encode_job(
        Job(
            "a" * 40,
            "",
            [1.5, b"x" * 300, None],
            70_000,
            5,
            retry=JobRetryOverride(7, BackoffSpec.exponential(250, multiplier=3, max_ms=10_000, jitter_ms=50)),
            payload_format="inline",
        )
    ),
    "job as map": packed({"id": "a", "payload": b"\x01", "created_at_ms": 5, "retry": {"backoff": {"kind": "fixed"}}}),
    "spec": encode_spec(
        RepeatableSpec("n", RepeatPattern.cron("0 9 * * 1-5", tz="America/Lima"), {"k": 1}, limit=3)
        .with_missed_fires(MissedFiresPolicy.fire_all(300))
        .stored()
    ),
    "delayed member": encode_delayed_member("later", encode_job(Job("a", "", 1))),
}


@pytest.mark.parametrize("data", SOUND.values(), ids=SOUND.keys())
def test_every_truncation_is_survived_and_none_is_read_as_whole(data: bytes) -> None:
    for end in range(len(data)):
        survive(data[:end])
        for decode in (decode_job, decode_spec):
            with pytest.raises(DecodeError):
                decode(data[:end])


@pytest.mark.parametrize("data", SOUND.values(), ids=SOUND.keys())
def test_every_byte_changed_is_survived(data: bytes) -> None:
    for position in range(min(len(data), 150)):
        for value in (0x00, 0x7F, 0x80, 0x91, 0xC0, 0xC1, 0xC4, 0xD4, 0xDB, 0xDD, 0xDF, 0xFF):
            survive(data[:position] + bytes([value]) + data[position + 1 :])


# --- bombs -----------------------------------------------------------------------------------------------------------

NESTS = {
    "arrays": b"\x91",
    "maps as values": b"\x81\x01",
    "maps as keys": b"\x81",
    "arrays as keys": b"\x81\x91",
    "array32": b"\xdd\x00\x00\x00\x01",
    "map32": b"\xdf\x00\x00\x00\x01\xc0",
    "wide arrays": b"\x9f",
}


def around(bomb: bytes) -> dict[str, bytes]:
    """Return envelopes and specs with a bomb in every place where a value can be."""
    envelope = [packed("a"), packed(b"\x01"), packed(5), packed(0), packed([None, None])]
    places = {
        f"slot {place}": b"\x95" + b"".join([*envelope[:place], bomb, *envelope[place + 1 :]]) for place in range(5)
    }
    places["alone"] = bomb
    places["within the payload"] = b"\x94" + envelope[0] + b"\xc6" + len(bomb).to_bytes(4, "big") + bomb + b"\x05\x00"
    places["backoff"] = b"\x95" + b"".join(envelope[:4]) + b"\x92\xc0" + bomb
    places["multiplier"] = b"\x95" + b"".join(envelope[:4]) + b"\x92\xc0\x95\xa5fixed\x05\xc0" + bomb + b"\xc0"
    places["unknown field"] = b"\x84\xa2id\xa1a\xa7payload\xc4\x01\x01\xadcreated_at_ms\x05\xa1z" + bomb
    places["field name"] = b"\x84\xa2id\xa1a\xa7payload\xc4\x01\x01\xadcreated_at_ms\x05" + bomb + b"\x00"
    places["pattern"] = b"\x98\xa1k\xa1n" + bomb + b"\xc4\x01\x01\xc0\xc0\xc0\x00"
    places["interval"] = b"\x98\xa1k\xa1n\x81\xa5Every" + bomb + b"\xc4\x01\x01\xc0\xc0\xc0\x00"
    return places


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS.keys())
def test_deep_nesting_is_survived_wherever_it_is(nest: bytes) -> None:
    for depth in (500, 995, 1000, 1030, 3_000):
        for data in around(nest * depth + b"\xc0").values():
            for decode in (read_job, read_spec, decode_slot):
                with contextlib.suppress(DecodeError):
                    decode(data)


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS.keys())
def test_a_hundred_thousand_levels_and_more_are_a_decode_error(nest: bytes) -> None:
    bomb = nest * (1_000_000 if nest == b"\x91" else 100_000) + b"\xc0"
    for decode in (read_job, read_spec, decode_slot):
        with pytest.raises(DecodeError):
            decode(bomb)
    with pytest.raises(DecodeError):
        read_job(b"\x94\xa1a" + bomb + b"\x05\x00")


CLAIMS = [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]


@pytest.mark.parametrize("lead", CLAIMS, ids=bytes.hex)
@pytest.mark.parametrize("claim", [2**32 - 1, 2**31, 2**24, 1000])
def test_a_length_that_is_only_claimed_costs_nothing(lead: bytes, claim: int) -> None:
    bomb = lead + claim.to_bytes(4, "big")
    for body in (bomb, bomb * 50, b"\x91" + bomb + b"\x01" * 9):
        assert peak_memory(*around(body).values()) < 200_000


def test_nested_lists_that_claim_more_than_they_hold_take_little_memory() -> None:
    claims = b"".join((b"\xdd" + count.to_bytes(4, "big")) * 200 for count in (1_000_000, 65_535))
    for bomb in (claims + b"\x00" * 1_000_000, b"\xdc\xff\xff" * 500 + b"\x00" * 70_000):
        # msgpack allocates at most 80 KB for a list before it has read its values, on at most 1024 levels. The lists
        # would take 1.7 GB if it believed their headers.
        assert peak_memory(bomb) < 100_000_000
        with pytest.raises(DecodeError, match="not MessagePack"):
            decode_slot(bomb)


ODDITIES = {
    "a map as key": b"\x81\x80\x01",
    "a list as key": b"\x81\x91\x01\x01",
    "a list with a map as key": b"\x81\x91\x80\x01",
    "an ext as key": b"\x81\xd4\x05\x00\x01",
    "the key nan": b"\x81\xcb\x7f\xf8" + bytes(6) + b"\x01",
    "ext types": b"\xd4\x05\x00",
    "a time out of range": b"\xd7\xff" + b"\xff" * 8,
    "no UTF-8": b"\xa2\xff\xfe",
    "half a surrogate pair": b"\xa3\xed\xa0\x80",
    "the lowest int": b"\xd3\x80" + bytes(7),
    "the highest int": b"\xcf" + b"\xff" * 8,
    "nan": b"\xcb\x7f\xf8" + bytes(6),
    "a signalling nan": b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x01",
    "inf": b"\xcb\x7f\xf0" + bytes(6),
    "-inf as float32": b"\xca\xff\x80\x00\x00",
    "the byte that is never used": b"\xc1",
}


@pytest.mark.parametrize("oddity", ODDITIES.values(), ids=ODDITIES.keys())
def test_oddities_are_survived_wherever_they_are(oddity: bytes) -> None:
    for data in around(oddity).values():
        survive(data)


def test_an_inner_payload_of_any_kind_leaves_the_envelope_readable() -> None:
    for oddity in (*ODDITIES.values(), b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b""):
        slot = b"\xc6" + len(oddity).to_bytes(4, "big") + oddity
        assert decode_job(b"\x94\xa1a" + slot + b"\x05\x00").payload_slot == slot


# --- linear ----------------------------------------------------------------------------------------------------------


def repeated(unit: bytes, size: int) -> bytes:
    return unit * (size // len(unit))


def array(unit: bytes, size: int) -> bytes:
    return b"\xdd" + (size // len(unit)).to_bytes(4, "big") + repeated(unit, size)


def pairs(unit: bytes, size: int) -> bytes:
    return b"\xdf" + (size // len(unit)).to_bytes(4, "big") + repeated(unit, size)


#: Hostile input of about the given size.
GROWING: dict[str, Callable[[int], bytes]] = {
    "nested arrays": lambda size: repeated(b"\x91", size) + b"\xc0",
    "nested arrays in the payload": lambda size: b"\x94\xa1a" + repeated(b"\x91", size) + b"\xc0\x05\x00",
    "nested maps in the retry": lambda size: b"\x95\xa1a\xc0\x05\x00" + repeated(b"\x81\x01", size) + b"\xc0",
    "a wide inline payload and bytes behind": lambda size: b"\x94\xa1a" + array(b"\x01", size) + b"\x05\x00\x00",
    "a wide envelope": lambda size: array(b"\xc0", size),
    "a map of unknown fields": lambda size: pairs(b"\xa1z\xc0", size),
    "a map of unknown numbers": lambda size: pairs(b"\x7f\xc0", size),
    "a retry of unknown fields": lambda size: b"\x95\xa1a\xc0\x05\x00" + pairs(b"\xa1z\xc0", size),
    "a backoff of unknown fields": lambda size: b"\x95\xa1a\xc0\x05\x00\x92\xc0" + pairs(b"\xa1z\xc0", size),
    "arrays that claim too much": lambda size: repeated(b"\xdc\xff\xff", size),
    "a long id": lambda size: b"\x94\xdb" + size.to_bytes(4, "big") + b"a" * size + b"\xc0\x05\x00",
    "a long id that is no UTF-8": lambda size: b"\x94\xdb" + size.to_bytes(4, "big") + b"\xff" * size + b"\xc0\x05\x00",
    "a spec with a payload of numbers": lambda size: (
        b"\x98\xa1k\xa1n\x81\xa5Every\x91\x05" + array(b"\x01", size) + b"\xc0\xc0\xc0\x00"
    ),
    "a spec with a wide payload": lambda size: (
        (b"\x98\xa1k\xa1n\x81\xa5Every\x91\x05\xc6" + (size + 5).to_bytes(4, "big") + array(b"\x01", size))
        + b"\xc0\xc0\xc0\x00"
    ),
    "a spec with a long expression": lambda size: (
        b"\x98\xa1k\xa1n\x81\xa4Cron\x92\xdb"
        + size.to_bytes(4, "big")
        + b"," * size
        + b"\xc0\xc4\x01\x01\xc0\xc0\xc0\x00"
    ),
}


def read_all(data: bytes) -> None:
    for decode in (read_job, read_spec, decode_slot, decode_delayed_member):
        with contextlib.suppress(DecodeError):
            decode(data)


def peak_memory(*inputs: bytes) -> int:
    """Return the largest amount of memory that reading any of them took."""
    tracemalloc.start()
    try:
        for data in inputs:
            read_all(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def calls_made(data: bytes) -> int:
    """Return the number of calls of functions, in Python and C, which does not depend on the machine's load."""
    count = 0

    def counting(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        read_all(data)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.untraced
@pytest.mark.parametrize("grow", GROWING.values(), ids=GROWING.keys())
def test_memory_and_calls_grow_no_faster_than_the_input(grow: Callable[[int], bytes]) -> None:
    read_all(grow(500))  # fills caches
    small, large = grow(1_000), grow(10_000)
    factor = len(large) / len(small)
    # Python keeps the memory of thousands of small objects for reuse, 3.14 of more kinds than 3.11: the small input may
    # seem to take none.
    assert peak_memory(large) <= 1.5 * factor * peak_memory(small) + 400_000
    assert peak_memory(large) <= 200 * len(large)
    assert calls_made(large) <= 1.2 * factor * calls_made(small) + 100


@pytest.mark.untraced
@pytest.mark.parametrize("grow", GROWING.values(), ids=GROWING.keys())
def test_a_quarter_of_a_megabyte_takes_less_than_half_a_second(grow: Callable[[int], bytes]) -> None:
    data = grow(250_000)
    for decode in (decode_job, decode_spec):
        start = time.process_time()
        with contextlib.suppress(DecodeError):
            decode(data)
        assert time.process_time() - start < 0.5
