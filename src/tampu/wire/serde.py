"""Structs and enums as Rust's serde reads them from MessagePack: more forms than any writer of today uses.

A struct is an array by position, or a map whose keys are field names (str or bin) or field numbers, in any order, with
unknown keys ignored and none there twice. An enum is a variant's name or number, alone or in a map of one to its
content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tampu.checks import MAX_U32
from tampu.errors import DecodeError
from tampu.wire.scan import NIL, count_of, is_array, is_map, slots_of, text_content

if TYPE_CHECKING:
    from collections.abc import Callable

#: The wire's numbers. MessagePack has none beyond 64 bits, and msgspec takes no bound beyond int64.
U64 = Annotated[int, msgspec.Meta(ge=0)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]
U8 = Annotated[int, msgspec.Meta(ge=0, le=255)]

#: What a typed decoder may raise on hostile bytes: all of it means "this is not what was expected".
REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError)


def reader(kind: Any) -> Callable[[bytes], Any]:
    """A function that reads one slot as `kind`, or raises `DecodeError`."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(slot: bytes) -> Any:
        try:
            return decode(slot)
        except REFUSALS as error:
            raise DecodeError(str(error)) from error

    return read


def read_text(slot: bytes) -> str:
    """Text, written as str or as bin."""
    content = text_content(slot)
    if content is None:
        raise DecodeError("expected text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"text is not UTF-8: {error}") from error


def fields_of(data: bytes, names: tuple[str, ...], *, in_array: int, in_map: int) -> dict[str, bytes]:
    """A struct's slots by field name. The first `in_array` or `in_map` fields must be there."""
    if is_array(data):
        if not in_array <= (count := count_of(data)) <= len(names):  # before any slot of a hostile array is looked at
            wanted = f"{in_array}" if in_array == len(names) else f"{in_array} to {len(names)}"
            raise DecodeError(f"expected an array of {wanted}; got {count}")
        return dict(zip(names, slots_of(data), strict=False))
    slots = slots_of(data)
    fields: dict[str, bytes] = {}
    for key, value in zip(slots[::2], slots[1::2], strict=True):
        name = _name_of(key, names)
        if name in fields:
            raise DecodeError(f"field {name!r} is there twice")
        if name is not None:
            fields[name] = value
    missing = [name for name in names[:in_map] if name not in fields]
    if missing:
        raise DecodeError(f"missing {', '.join(missing)}")
    return fields


def variant_of(data: bytes, names: tuple[str, ...]) -> tuple[str | None, bytes]:
    """(name, content slot) of an enum. The content of a bare variant is nil, the name of an unknown one None."""
    if not is_map(data):
        return _name_of(data, names), NIL
    slots = slots_of(data) if count_of(data) == 2 else []
    if not slots:
        raise DecodeError("expected a map of one variant to its content")
    return _name_of(slots[0], names), slots[1]


def _name_of(key: bytes, names: tuple[str, ...]) -> str | None:
    """The name a key spells or numbers; None when there is no such name."""
    lead = key[0]
    if lead <= 0x7F or 0xCC <= lead <= 0xCF:
        number = lead if lead <= 0x7F else int.from_bytes(key[1:], "big")
        return names[number] if number < len(names) else None
    content = text_content(key)
    if content is None:
        raise DecodeError("a key or variant is neither text nor a number")
    text = content.decode(errors="replace")
    return text if text in names else None
