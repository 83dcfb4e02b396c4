"""The payload slot: only values that decode to equal values are encoded; both formats are decoded."""

from __future__ import annotations

import ast
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import reduce
from typing import Any

import msgpack
import pytest
from hypothesis import given

from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.payload import (
    MAX_NESTING,
    check_payload_format,
    decode_slot,
    decode_value,
    encode_slot,
    encode_value,
    encode_values,
    slot_format,
    wrap_bin,
)

from .strategies import examples, values
from .vectors import vectors


@dataclass
class Invoice:
    total: int


def nested(depth: int) -> list[Any]:
    return reduce(lambda inner, _: [inner], range(depth - 1), [])


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


UNFAITHFUL = {
    "Decimal": Decimal("1.10"),
    "UUID": uuid.UUID(int=7),
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "naive datetime": datetime(2027, 1, 1),
    "date": date(2027, 1, 1),
    "timedelta": timedelta(1),
    "dataclass": Invoice(3),
    "2**70": 2**70,
    "2**64": 2**64,
    "-2**63 - 1": -(2**63) - 1,
    "object": object(),
    "lone surrogate": "a\ud800",
    "lone surrogate as key": {"\udfff": 1},
    "complex": 1j,
    "type": int,
    "bytes that are not in one piece": memoryview(b"abcd")[::2],
}


@pytest.mark.parametrize("value", UNFAITHFUL.values(), ids=UNFAITHFUL.keys())
@pytest.mark.parametrize("within", [False, True], ids=["alone", "within"])
def test_a_value_that_would_not_come_back_the_same_is_refused_and_named(value: Any, within: bool) -> None:
    with pytest.raises(EncodeError, match="has no faithful MessagePack form") as refusal:
        encode_slot({"x": [value]} if within else value)
    assert refusal.value.code == "CMQ-002"
    assert repr(value)[:20] in str(refusal.value)


@pytest.mark.parametrize("depth", [512, 513, 600, 1000, 1025, 5000])
@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"x": inner}, lambda inner: (inner,)])
def test_nesting_too_deep_to_be_read_back_is_refused(wrap: Any, depth: int) -> None:
    value = reduce(lambda inner, _: wrap(inner), range(depth - 1), wrap("x"))
    # On every version of Python: the worker's may be older than the producer's.
    if depth <= MAX_NESTING:
        assert encode_value(decode_value(encode_value(value))) == encode_value(value)
    else:
        with pytest.raises(EncodeError, match="has no faithful MessagePack form"):
            encode_value(value)


def test_a_wide_payload_is_not_taken_for_a_deep_one() -> None:
    rows = [{"tags": ["a", "b"], "at": [[1, 2], [3]]} for _ in range(2000)]
    assert decode_value(encode_value(rows)) == rows


def test_a_caller_with_a_deep_stack_may_still_encode() -> None:
    def at_depth(calls: int) -> bytes:
        return encode_value({"x": ["y" * 5000, [1]]}) if calls == 0 else at_depth(calls - 1)

    assert len(at_depth(700)) > 5000


@pytest.mark.parametrize(
    "value", [10**5000, nested(100_000), Unshowable()], ids=["5000 digits", "100000 deep", "no repr"]
)
def test_a_value_that_cannot_be_shown_is_an_encode_error_too(value: Any) -> None:
    for payload in (value, [value], {"x": value}):
        with pytest.raises(EncodeError, match="has no faithful MessagePack form"):
            encode_value(payload)


def test_an_error_shows_little_of_a_huge_payload() -> None:
    with pytest.raises(EncodeError) as refusal:
        encode_value({"rows": ["x" * 1000] * 100_000, "bad": {1}})
    assert len(str(refusal.value)) < 1000


def test_a_packer_is_sound_after_a_refusal() -> None:
    before = encode_value({"a": 1})
    with pytest.raises(EncodeError):
        encode_value([1, 2, "three", object()])
    assert encode_value({"a": 1}) == before


@pytest.mark.parametrize(
    "value",
    [
        datetime(2027, 1, 1, 12, 30, 15, 123456, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(9999, 12, 31, tzinfo=UTC),
        {1: "one", -2: "two", b"b": "bytes", "s": "str"},
        b"\x00\xff",
        2**64 - 1,
        -(2**63),
        "héllo 世界 🎉\x00",
        float("inf"),
        -0.0,
        nested(500),
        {"a": {"b": [1, None, True, 2.5, "s", b"x"]}},
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_faithful_value_comes_back_the_same_in_either_format(value: Any) -> None:
    assert repr(decode_slot(encode_slot(value))) == repr(value)
    if not isinstance(value, bytes):
        assert repr(decode_slot(encode_slot(value, "inline"))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))),
        # In its bytes, only the first could start an extension, a list or a dict.
        datetime(9999, 12, 31, 23, 0, 32, tzinfo=timezone(-timedelta(hours=1))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_a_datetime_that_is_out_of_range_in_utc_is_not_written(value: datetime) -> None:
    for write in (encode_value, lambda value: encode_value([value]), lambda value: encode_values([{}, value])):
        with pytest.raises(EncodeError, match="no faithful MessagePack form"):
            write(value)


def test_an_aware_datetime_comes_back_as_the_same_instant_in_utc() -> None:
    lima = datetime(2027, 1, 1, tzinfo=timezone(timedelta(hours=-5)))
    back = decode_slot(encode_slot(lima))
    assert back == lima
    assert back.utcoffset() == timedelta(0)


def test_tuples_come_back_as_lists_and_subclasses_as_their_base() -> None:
    assert decode_slot(encode_slot((1, (2,)))) == [1, [2]]
    back = decode_slot(encode_slot(OrderedDict(a=1)))
    assert type(back) is dict


@given(values)
@examples(80)
def test_any_faithful_value_comes_back_in_either_format(value: Any) -> None:
    assert decode_slot(encode_slot(value)) == value
    if not isinstance(value, bytes):
        assert decode_slot(encode_slot(value, "inline")) == value


@given(values)
@examples(50)
def test_values_are_written_as_msgpack_python_writes_them(value: Any) -> None:
    packed = msgpack.packb(value, use_bin_type=True, datetime=True)
    assert encode_value(value) == packed
    assert encode_slot(value) == msgpack.packb(packed, use_bin_type=True)


def test_bytes_cannot_be_inline_because_they_would_be_read_as_bin() -> None:
    for value in (b"\x01", bytearray(b"\x01"), b"x" * 300, b"x" * 70_000):
        with pytest.raises(EncodeError, match="payload_format 'bin'"):
            encode_slot(value, "inline")
        assert decode_slot(encode_slot(value)) == value
    assert decode_slot(encode_slot([b"\x01"], "inline")) == [b"\x01"]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65535, 65536, 100_000])
def test_the_bin_header_is_the_smallest(size: int) -> None:
    assert wrap_bin(bytes(size)) == msgpack.packb(bytes(size), use_bin_type=True)


def test_the_first_byte_determines_the_format_of_a_slot() -> None:
    assert [slot_format(wrap_bin(bytes(size))) for size in (0, 300, 70_000)] == ["bin"] * 3
    assert [slot_format(encode_slot(value, "inline")) for value in (None, 1, "x", [], {})] == ["inline"] * 5
    assert check_payload_format("bin") == "bin"
    assert check_payload_format("inline") == "inline"
    for other in ("Bin", "", None, 1):
        with pytest.raises(ConfigError, match="payload_format must be 'bin'"):
            check_payload_format(other)


@pytest.mark.parametrize(
    "slot",
    [
        b"",
        b"\xc4",
        b"\xc4\x05\x01",  # claims more than there is
        b"\xc4\x01\x01\x01",  # bytes behind
        b"\xc4\x00",  # wraps nothing
        b"\xc4\x02\x01\x01",  # wraps two values
        b"\xc4\x01\xc1",
        b"\xc4\x02\xa1\xff",  # not UTF-8
        b"\xc1",
        b"\x01\x01",
        b"\x81\x80\x01",  # a map as key
        b"\x81\x91\x80\x01",  # a list with a map in it as key
        b"\x81\xd4\x05\x00\x01",  # an ext as key
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a time with too many nanoseconds
        b"\xc7\x0c\xff" + bytes(4) + b"\x7f" + b"\xff" * 7,  # a time beyond the year 9999
        b"\xc7\x00\xff",  # a time without a body
    ],
    ids=bytes.hex,
)
def test_a_slot_that_holds_no_value_is_a_decode_error(slot: bytes) -> None:
    with pytest.raises(DecodeError) as error:
        decode_slot(slot)
    assert error.value.code == "CMQ-003"


@pytest.mark.parametrize(
    "vector", [v for v in vectors("cmq_captures.json", "refusals") if v.values[0]["name"].startswith("plain_add_bad")]
)
def test_values_that_1_3_0_cannot_encode_are_rejected(vector: dict[str, Any]) -> None:
    text = vector["input"]["python_repr"]
    with pytest.raises(EncodeError):
        encode_value(object() if text.startswith("<object") else ast.literal_eval(text))


def test_decode_value_reads_exactly_one_value() -> None:
    assert decode_value(b"\x01") == 1
    for data in (b"", b"\x01\x01"):
        with pytest.raises(DecodeError):
            decode_value(data)
