"""Structs and enums in every form that serde accepts."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tampu.errors import DecodeError
from tampu.wire.scan import U8, U64, fields_of, read_text, reader, variant_of


def packed(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def fields(value: Any) -> dict[str, bytes]:
    return fields_of(value if isinstance(value, bytes) else packed(value), ("a", "b", "c"), in_array=2, in_map=1)


@pytest.mark.parametrize(
    "form",
    [[1, 2], {"a": 1, "b": 2}, {b"a": 1, b"b": 2}, {0: 1, 1: 2}, {"b": 2, "a": 1}, {"z": 9, "a": 1, 17: 9, 1: 2}],
)
def test_a_struct_is_read_by_position_name_or_number(form: Any) -> None:
    assert fields(form) == {"a": b"\x01", "b": b"\x02"}


def test_bytes_behind_a_struct_are_ignored() -> None:
    assert fields(packed([1, 2]) + b"\xc1") == {"a": b"\x01", "b": b"\x02"}


def test_an_unknown_key_that_is_not_utf8_is_ignored() -> None:
    assert fields(b"\x82" + packed("a") + b"\x01" + b"\xa1\xff\x02") == {"a": b"\x01"}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ([1], "array of 2 to 3 values; got 1"),
        ([1, 2, 3, 4], "array of 2 to 3 values; got 4"),
        ({"b": 2}, "missing fields: a"),
        (b"\x82" + packed("a") + b"\x01" + packed("a") + b"\x02", "duplicate field 'a'"),
        (b"\x82" + packed("a") + b"\x01" + b"\x00" + b"\x02", "duplicate field 'a'"),
        ({None: 1, "a": 1}, "must be text or a number"),
        ({1.5: 1, "a": 1}, "must be text or a number"),
        ({-1: 1, "a": 1}, "must be text or a number"),
        ({True: 1, "a": 1}, "must be text or a number"),
        ({(): 1, "a": 1}, "must be text or a number"),
        (7, "array or map"),
        (b"", "array or map"),
    ],
)
def test_a_struct_in_any_other_form_is_a_decode_error(form: Any, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        fields(form)


def test_doubled_unknown_fields_are_ignored() -> None:
    assert fields(b"\x83" + packed("a") + b"\x01" + (packed("z") + b"\x02") * 2) == {"a": b"\x01"}


@pytest.mark.parametrize("form", ["B", b"B", 1, {"B": None}, {b"B": None}, {1: None}])
def test_a_variant_without_content_is_read_by_name_or_number(form: Any) -> None:
    assert variant_of(packed(form), ("A", "B")) == ("B", b"\xc0")


def test_a_variant_with_content_is_a_map_of_one() -> None:
    assert variant_of(packed({"A": [7]}), ("A", "B")) == ("A", b"\x91\x07")
    for other in ({"A": 1, "B": 2}, {}):
        with pytest.raises(DecodeError, match="one variant"):
            variant_of(packed(other), ("A", "B"))


@pytest.mark.parametrize("form", ["C", "a", 2, 2**64 - 1, {"C": None}])
def test_an_unknown_variant_has_no_name(form: Any) -> None:
    assert variant_of(packed(form), ("A", "B"))[0] is None


@pytest.mark.parametrize("form", [None, True, 1.5, -1, [], ["A"], {None: 1}])
def test_a_key_that_cannot_name_a_variant_is_a_decode_error(form: Any) -> None:
    with pytest.raises(DecodeError):
        variant_of(packed(form), ("A", "B"))


def test_text_is_str_or_bin_and_utf8() -> None:
    assert read_text(packed("é")) == read_text(packed("é".encode())) == "é"
    for slot in (b"\xa1\xff", b"\xc4\x01\xff", packed(7), packed(None)):
        with pytest.raises(DecodeError):
            read_text(slot)


def test_numbers_keep_their_bounds() -> None:
    assert reader(U64)(packed(2**64 - 1)) == 2**64 - 1
    assert reader(U64)(b"\xd3" + (5).to_bytes(8, "big")) == 5
    assert reader(U8)(b"\xcc\xff") == 255
    for kind, value in ((U64, -1), (U64, 1.0), (U64, True), (U64, None), (U64, "1"), (U8, 256)):
        with pytest.raises(DecodeError, match="Expected `int`"):
            reader(kind)(packed(value))
