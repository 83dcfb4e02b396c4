"""Split hostile or unusual MessagePack safely: bytes after a value, and every form that Rust's serde accepts.

It finds the end of a value and splits arrays and maps into slots without building values. It is safe for hostile input:
no recursion, no allocation for claimed lengths, time linear in the input. It refuses values of over 1024 levels, which
cannot be decoded either.

serde reads a struct from an array by position, or from a map whose keys are field names (str or bin) or field numbers,
in any order; unknown keys are ignored, duplicates rejected. It reads an enum from a variant's name or number, alone or
as the only key of a map to its content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgpack
import msgspec

from tampu.base.checks import MAX_U32
from tampu.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Integers of the wire format. U64 has no upper bound: MessagePack stops at 64 bits, and msgspec's bounds at int64.
U64 = Annotated[int, msgspec.Meta(ge=0)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U32)]
U8 = Annotated[int, msgspec.Meta(ge=0, le=255)]

#: Errors that a typed decoder raises for hostile bytes; each means "not the expected type".
REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError)

#: The encoded None.
NIL = b"\xc0"

#: Maximum number of fields of a struct that is written as a map, unknown ones included.
MAX_FIELDS = 1000

#: By leading byte: bytes of the length of a str or bin, and of the count of an array or map.
_STR_AND_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY_AND_MAP = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}

#: Where the content of a str or bin begins.
_CONTENT_AT = {lead: 1 + width for lead, width in _STR_AND_BIN.items()} | dict.fromkeys(range(0xA0, 0xC0), 1)


def end_of_value(data: bytes, position: int = 0) -> int:
    """Return the position after the value that starts at `position`."""
    return next(_ends(data, position, 1))


def _ends(data: bytes, position: int, count: int) -> Iterator[int]:
    """Yield the positions after each of `count` values, the first of which starts at `position`."""
    walker = msgpack.Unpacker(max_buffer_size=len(data) or 1)  # 0 means 2 GiB
    walker.feed(memoryview(data)[position:])
    for _ in range(count):
        try:
            walker.skip()
        except msgpack.StackError:
            raise DecodeError("MessagePack is nested too deeply") from None
        except msgpack.FormatError:
            raise DecodeError("a byte is not the start of a MessagePack value") from None
        except (msgpack.OutOfData, ValueError):  # the end is missing, or a claimed length exceeds the input
            raise DecodeError(f"MessagePack ends after {len(data)} bytes in the middle of a value") from None
        yield position + walker.tell()


def is_array(data: bytes) -> bool:
    """Return whether the value is an array."""
    return bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))


def is_map(data: bytes) -> bool:
    """Return whether the value is a map."""
    return bool(data) and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))


def _children_of(data: bytes) -> tuple[int, int]:
    """Return (position of the first child, number of children) of an array or a map."""
    if not is_array(data) and not is_map(data):
        raise DecodeError("expected a MessagePack array or map")
    first = 1 + _ARRAY_AND_MAP.get(data[0], 0)
    count = int.from_bytes(data[1:first], "big") if first > 1 else data[0] & 0x0F
    if is_map(data):
        count *= 2
    if count > len(data) - first:
        raise DecodeError(f"MessagePack claims {count} values in {max(len(data) - first, 0)} bytes")
    return first, count


def count_of(data: bytes) -> int:
    """Return how many values an array claims to contain; for a map, keys plus values."""
    return _children_of(data)[1]


def slots_of(data: bytes) -> list[bytes]:
    """Return the encoded children of an array (or of a map: key, value, key, value ...), ignoring bytes after it."""
    position, count = _children_of(data)
    slots: list[bytes] = []
    for end in _ends(data, position, count):
        slots.append(data[position:end])
        position = end
    return slots


def bin_content(slot: bytes) -> bytes | None:
    """Return the content of a bin that fills the slot exactly; None if the slot holds anything else."""
    if slot[:1] not in (b"\xc4", b"\xc5", b"\xc6"):
        return None
    start = _CONTENT_AT[slot[0]]
    return slot[start:] if start + int.from_bytes(slot[1:start], "big") == len(slot) else None


def text_content(slot: bytes) -> bytes | None:
    """Return the content of a str or bin in a slot of `slots_of`; None if it is neither."""
    start = _CONTENT_AT.get(slot[0])
    return None if start is None else slot[start:]


def reader(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that reads one slot as `kind` and raises `DecodeError` if it cannot."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(slot: bytes) -> Any:
        try:
            return decode(slot)
        except REFUSALS as error:
            raise DecodeError(str(error)) from error

    return read


def read_text(slot: bytes) -> str:
    """Read text, written as str or as bin."""
    content = text_content(slot)
    if content is None:
        raise DecodeError("expected text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"text is not UTF-8: {error}") from error


def fields_of(data: bytes, names: tuple[str, ...], *, in_array: int, in_map: int) -> dict[str, bytes]:
    """Return a struct's slots by field name. The first `in_array` or `in_map` fields are required."""
    if is_array(data):
        if not in_array <= (count := count_of(data)) <= len(names):  # checked before reading a hostile array's slots
            expected = f"{in_array}" if in_array == len(names) else f"{in_array} to {len(names)}"
            raise DecodeError(f"expected an array of {expected} values; got {count}")
        return dict(zip(names, slots_of(data), strict=False))
    if count_of(data) > 2 * MAX_FIELDS:
        raise DecodeError(f"expected a map of at most {MAX_FIELDS} fields; got {count_of(data) // 2}")
    slots = slots_of(data)
    fields: dict[str, bytes] = {}
    for key, value in zip(slots[::2], slots[1::2], strict=True):
        name = _name_of(key, names)
        if name in fields:
            raise DecodeError(f"duplicate field {name!r}")
        if name is not None:
            fields[name] = value
    missing = [name for name in names[:in_map] if name not in fields]
    if missing:
        raise DecodeError(f"missing fields: {', '.join(missing)}")
    return fields


def variant_of(data: bytes, names: tuple[str, ...]) -> tuple[str | None, bytes]:
    """Return (name, content slot) of an enum. A bare variant has content nil, an unknown one the name None."""
    if not is_map(data):
        return _name_of(data, names), NIL
    slots = slots_of(data) if count_of(data) == 2 else []
    if not slots:
        raise DecodeError("expected a map with one variant as its only key")
    return _name_of(slots[0], names), slots[1]


def _name_of(key: bytes, names: tuple[str, ...]) -> str | None:
    """Return the field that a key names by text or number; None if there is no such field."""
    lead = key[0]
    if lead <= 0x7F or 0xCC <= lead <= 0xCF:
        number = lead if lead <= 0x7F else int.from_bytes(key[1:], "big")
        return names[number] if number < len(names) else None
    content = text_content(key)
    if content is None:
        raise DecodeError("a key or variant must be text or a number")
    text = content.decode(errors="replace")
    return text if text in names else None
