"""Bulks are encoded in one go, to the same bytes as one by one."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

import pytest

from tampu.errors import EncodeError
from tampu.wire.envelope import fresh_envelopes, packed_envelopes
from tampu.wire.payload import encode_value, encode_values
from tampu.wire.ulid import RANDOM_BYTES, encode_ulid, encode_ulids

NOW_MS = 1_794_770_167_273


def test_envelopes_made_by_one_format_are_the_same() -> None:
    # 37 is "%" in a header of one byte, 9509 in both of two.
    payloads = [os.urandom(size) for size in (0, 1, 37, 255, 256, 9509, 65_535, 65_536, 70_000, 1)]
    ids = encode_ulids(NOW_MS, os.urandom(RANDOM_BYTES * len(payloads)))
    one_by_one = fresh_envelopes(ids, payloads, NOW_MS)
    expected = b"".join(b"$%d\r\n%b\r\n" % (len(envelope), envelope) for envelope in one_by_one)
    assert packed_envelopes(ids, payloads, NOW_MS) == expected


def test_the_time_of_a_clock_set_wrong_has_another_length() -> None:
    assert packed_envelopes(["0" * 26], [b"x"], 1000) is None


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_many_ids_are_the_same_as_one_by_one(count: int) -> None:
    random = os.urandom(RANDOM_BYTES * count)
    chunks = [random[start : start + RANDOM_BYTES] for start in range(0, len(random), RANDOM_BYTES)]
    assert encode_ulids(NOW_MS, random) == [encode_ulid(NOW_MS, chunk) for chunk in chunks]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [{}, {"a": 1}, {"b": "x" * 5000}],
        [{"a": {"b": [1, 2]}}, {"a": 1}],
        [1, None, "text", b"bytes", [1, 2], {"a": 1}],
        [{1: 2}, {None: True}],
        [{"a": "é\x80\u0731"}, {"a": 0x9192, "b": -100}, {"at": datetime(2026, 1, 1, tzinfo=UTC)}],
        [{datetime(2026, 1, 1, tzinfo=UTC): 1}, {"a": 1}],
        range(5),
    ],
    ids=["none", "flat", "nested", "mixed", "other keys", "bytes that could start a list", "a time as key", "a range"],
)
def test_many_values_are_encoded_as_one_by_one(values: Any) -> None:
    assert encode_values(values) == [encode_value(value) for value in values]


@pytest.mark.parametrize(
    "refused",
    [{(1, 2): 3}, {"a": {(1,): 2}}, [{(1,): 2}], {"a": object()}, {"a": {1, 2}}],
    ids=["key", "nested key", "key in a list", "object", "set"],
)
@pytest.mark.parametrize("other", [{"a": 1}, 1, {"a": "x" * 5000}], ids=["among flat ones", "among others", "large"])
def test_what_one_value_may_not_be_none_of_many_may_be(refused: Any, other: Any) -> None:
    with pytest.raises(EncodeError):
        encode_value(refused)
    with pytest.raises(EncodeError):
        encode_values([other, refused, other])


def test_a_value_nested_too_deeply_is_refused_among_flat_ones() -> None:
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(EncodeError):
        encode_values([{"a": 1}, {"deep": deep}])
