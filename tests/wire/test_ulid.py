"""ULIDs, compared with those of ChasquiMQ 1.3.0."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.errors import DecodeError
from tampu.wire.ulid import (
    ALPHABET,
    MAX_TIME_MS,
    RANDOM_BYTES,
    decode_ulid_time,
    encode_time,
    encode_ulid,
    encode_ulids,
    ulid_from_bits,
)

from .strategies import examples
from .vectors import vectors

times = st.integers(0, MAX_TIME_MS)
randoms = st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES)


@pytest.mark.parametrize("vector", vectors("codec.json", "ulid"))
def test_a_captured_ulid_is_read_and_written(vector: dict[str, Any]) -> None:
    ulid, time_ms = vector["ulid"], vector["time_ms"]
    values = [ALPHABET.index(character) for character in ulid[10:]]
    entropy = sum(value << 5 * (15 - place) for place, value in enumerate(values))
    assert decode_ulid_time(ulid) == time_ms == vector["created_at_ms"]
    assert encode_time(time_ms) == ulid[:10]
    assert encode_ulid(time_ms, bytes(values)) == ulid
    assert ulid_from_bits(time_ms, entropy) == ulid


@given(times, randoms)
@examples(60)
def test_the_time_comes_back(time_ms: int, random: bytes) -> None:
    ulid = encode_ulid(time_ms, random)
    assert decode_ulid_time(ulid) == time_ms
    assert len(ulid) == 26
    assert set(ulid) <= set(ALPHABET)


@given(times, times, randoms)
@examples(40)
def test_ids_sort_by_time(one: int, other: int, random: bytes) -> None:
    assert (encode_ulid(one, random) < encode_ulid(other, random)) == (one < other)


@given(times, st.lists(randoms, max_size=5))
@examples(30)
def test_ids_made_in_bulk_are_those_made_one_by_one(time_ms: int, parts: list[bytes]) -> None:
    assert encode_ulids(time_ms, b"".join(parts)) == [encode_ulid(time_ms, part) for part in parts]


@given(times, st.integers(0, 2**80 - 1))
@examples(30)
def test_all_80_bits_count(time_ms: int, entropy: int) -> None:
    base = ulid_from_bits(time_ms, entropy)
    assert base == ulid_from_bits(time_ms, entropy)
    assert len({base, *(ulid_from_bits(time_ms, entropy ^ 1 << bit) for bit in range(80))}) == 81


def test_every_random_character_is_equally_likely() -> None:
    text = encode_ulids(0, bytes(range(256)))
    counts = {character: "".join(ulid[10:] for ulid in text).count(character) for character in ALPHABET}
    assert set(counts.values()) == {8}


@pytest.mark.parametrize(
    "text", ["", "0" * 25, "0" * 27, "O" + "0" * 25, "0" * 25 + "l", "01m7ga6sf90w0p6h8nhcb3rczj", "8" + "0" * 25]
)
def test_text_that_is_not_a_ulid_is_a_decode_error(text: str) -> None:
    with pytest.raises(DecodeError):
        decode_ulid_time(text)


def test_times_and_random_parts_of_the_wrong_size_are_refused() -> None:
    for time_ms in (-1, MAX_TIME_MS + 1):
        with pytest.raises(ValueError, match=str(time_ms)):
            encode_time(time_ms)
    for size in (0, 15, 17, 32):
        with pytest.raises(ValueError, match=f"got {size}"):
            encode_ulid(0, bytes(size))
    with pytest.raises(ValueError, match="got 20"):  # the last id would be too short
        encode_ulids(0, bytes(20))
