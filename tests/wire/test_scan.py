"""Scanning MessagePack without building values."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given

from tampu.errors import DecodeError
from tampu.wire.scan import bin_content, count_of, end_of_value, is_array, is_map, slots_of, text_content

from .strategies import damaged, examples, values


def packed(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True, datetime=True)


#: A value for each leading byte whose size comes from a number or a table.
ONE_OF_EACH: list[Any] = [
    *(None, True, False, 0, 127, -1, -32, 1.5, 128, 2**8, 2**16, 2**32, 2**64 - 1, -33, -129, -(2**15) - 1, -(2**63)),
    *("", "x" * 31, "x" * 32, "x" * 256, "x" * 65536, b"", b"x" * 256, b"x" * 65536),
    *([], [1] * 15, [1] * 16, [1] * 65536, {}, {n: n for n in range(15)}, {n: n for n in range(65536)}),
    *(msgpack.ExtType(5, bytes(size)) for size in (0, 1, 2, 4, 8, 16, 17, 256, 65536)),
]


@pytest.mark.parametrize("value", ONE_OF_EACH, ids=lambda value: f"{type(value).__name__}-{packed(value)[:1].hex()}")
def test_a_value_of_every_form_ends_where_it_ends(value: Any) -> None:
    data = packed(value)
    assert end_of_value(data) == len(data)
    assert end_of_value(data + b"\xc1tail") == len(data)
    assert end_of_value(b"\xc1" + data, 1) == len(data) + 1
    with pytest.raises(DecodeError):
        end_of_value(data[:-1])


def test_float32_is_four_bytes() -> None:
    assert end_of_value(b"\xca\x00\x00\x00\x00") == 5


@given(values)
@examples(50)
def test_any_value_ends_where_it_ends(value: Any) -> None:
    data = packed(value)
    assert end_of_value(data + b"\x00") == len(data)
    assert is_array(data) == isinstance(value, list)
    assert is_map(data) == isinstance(value, dict)


@given(values)
@examples(60)
def test_slots_are_the_encoded_children(value: Any) -> None:
    data = packed(value)
    if isinstance(value, list):
        assert slots_of(data) == [packed(child) for child in value]
        assert count_of(data) == len(value)
    elif isinstance(value, dict):
        assert slots_of(data + b"tail") == [packed(part) for pair in value.items() for part in pair]
        assert count_of(data) == 2 * len(value)
    else:
        with pytest.raises(DecodeError, match="array or map"):
            slots_of(data)


@given(damaged(values.map(packed)))
@examples(50)
def test_the_end_is_within_the_bytes_or_there_is_none(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert 0 < end_of_value(data) <= len(data)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91\xc1", b"\xdd\x00", b"\xdf\x00\x00\x00\x01\x01", b"\xc7\x01", b"\x92\x01"]
)
def test_a_truncated_value_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        end_of_value(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\xc1", b"\xdd\x00", b"\xdc", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff\x01"]
)
def test_a_container_that_claims_more_than_there_is_has_no_slots(data: bytes) -> None:
    with pytest.raises(DecodeError):
        slots_of(data)


class Watched(bytes):
    """Bytes that count how often they are read."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("lead", [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_an_impossible_count_is_rejected_before_values_are_read(lead: bytes) -> None:
    data = Watched(lead + b"\x01" * 50_000)
    with pytest.raises(DecodeError):
        end_of_value(data)
    with pytest.raises(DecodeError):
        slots_of(data)
    assert data.looks < 20


def test_the_content_of_text_and_bin() -> None:
    for size in (0, 1, 31, 32, 255, 256, 65535, 65536):
        assert text_content(packed("x" * size)) == b"x" * size
        assert text_content(packed(b"x" * size)) == b"x" * size
        assert bin_content(packed(b"x" * size)) == b"x" * size
        assert bin_content(packed("x" * size)) is None
    assert text_content(packed(7)) is None
    assert bin_content(b"") is None
    assert bin_content(packed(b"x") + b"tail") is None
