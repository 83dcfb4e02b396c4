"""Split hostile or unusual MessagePack safely: bytes after a value, and every form that Rust's serde accepts.

It finds the end of a value and splits arrays and maps into slots without building values. It is safe for hostile input:
no recursion, no allocation for claimed lengths, time linear in the input. Long input is walked by msgpack's C code.

serde reads a struct from an array by position, or from a map whose keys are field names (str or bin) or field numbers,
in any order; unknown keys are ignored, duplicates rejected. It reads an enum from a variant's name or number, alone or
as the only key of a map to its content.
"""

from __future__ import annotations

import itertools
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

#: Input beyond this size is walked in C, in bytes: a million values take 100 ms in Python.
LONG_BYTES = 4096
#: Values nested over 1024 levels deep are walked in Python up to this size of the input, and refused beyond, in bytes.
DEEP_BYTES = 262_144
#: Maximum number of fields of a struct that is written as a map, unknown ones included.
MAX_FIELDS = 1000

# For leading bytes followed by a number: the size of the number in bytes, and what it counts.
_BYTES = 1  # bytes of the body
_CHILDREN = 2  # values that follow
_PAIRS = 3  # pairs of values that follow
_EXT = 4  # bytes of the body, plus one for the type

_STR_AND_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_NUMBERED = (
    {lead: (width, _BYTES) for lead, width in _STR_AND_BIN.items()}
    | {0xC7: (1, _EXT), 0xC8: (2, _EXT), 0xC9: (4, _EXT)}
    | {0xDC: (2, _CHILDREN), 0xDD: (4, _CHILDREN), 0xDE: (2, _PAIRS), 0xDF: (4, _PAIRS)}
)
#: Bytes of the body, by leading byte: nil and bools, floats, unsigned and signed integers, fixext with its type.
_FIXED_BODIES = (
    {0xC0: 0, 0xC2: 0, 0xC3: 0}
    | {0xCA: 4, 0xCB: 8}
    | {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
    | {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    | {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
)


def _size(lead: int) -> int:
    """Return the size of a value without its children if the leading byte determines it, else 0."""
    if 0xA0 <= lead <= 0xBF:
        return 1 + (lead & 0x1F)
    if lead <= 0x9F or lead >= 0xE0:
        return 1
    return 1 + _FIXED_BODIES[lead] if lead in _FIXED_BODIES else 0


def _children(lead: int) -> int:
    """Return the number of children if the leading byte determines it, else 0."""
    if 0x80 <= lead <= 0x8F:
        return 2 * (lead & 0x0F)
    return lead & 0x0F if 0x90 <= lead <= 0x9F else 0


# Tables by leading byte: hostile input may hold a million values, so most of them must take a single lookup.
_SIZES = tuple(_size(lead) for lead in range(256))
_COUNTS = tuple(_children(lead) for lead in range(256))

#: Where the content of a str or bin begins.
_CONTENT_AT = {lead: 1 + width for lead, width in _STR_AND_BIN.items()} | dict.fromkeys(range(0xA0, 0xC0), 1)


def _numbered_header(data: bytes, position: int) -> tuple[int, int]:
    """Return (position after the header and body, number of children) of a value whose header holds a number."""
    lead = data[position]
    if lead not in _NUMBERED:
        raise DecodeError(f"byte {position} is 0x{lead:02x}, which is not the start of a MessagePack value")
    width, meaning = _NUMBERED[lead]
    position += 1 + width
    number = int.from_bytes(data[position - width : position], "big")
    if meaning == _BYTES:
        return position + number, 0
    if meaning == _EXT:
        return position + number + 1, 0
    return position, number if meaning == _CHILDREN else 2 * number


def end_of_value(data: bytes, position: int = 0) -> int:
    """Return the position after the value that starts at `position`."""
    return next(_ends(data, position, 1))


def _ends(data: bytes, position: int, count: int) -> Iterator[int]:
    """Yield the positions after each of `count` values, the first of which starts at `position`."""
    if len(data) - position <= LONG_BYTES:
        yield from _python_ends(data, position, count)
        return
    walker = msgpack.Unpacker(max_buffer_size=len(data))
    walker.feed(memoryview(data)[position:])
    for done in range(count):
        try:
            walker.skip()
        except msgpack.StackError:  # over 1024 levels
            if len(data) > DEEP_BYTES:
                raise DecodeError("MessagePack is nested too deeply") from None
            yield from itertools.islice(_python_ends(data, position, count), done, None)
            return
        except msgpack.FormatError:
            raise DecodeError("a byte is not the start of a MessagePack value") from None
        except (msgpack.OutOfData, ValueError):  # the end is missing, or a claimed length exceeds the input
            raise DecodeError(f"MessagePack ends after {len(data)} bytes in the middle of a value") from None
        yield position + walker.tell()


def _python_ends(data: bytes, position: int, count: int) -> Iterator[int]:
    for _ in range(count):
        position = _python_end(data, position)
        yield position


def _python_end(data: bytes, position: int) -> int:
    size = len(data)
    outstanding = 1
    while outstanding:
        # Every value takes at least a byte, so the size of the input bounds the loop, not the claimed lengths.
        if outstanding > size - position:
            raise DecodeError(f"MessagePack ends after {size} bytes in the middle of a value")
        lead = data[position]
        own = _SIZES[lead]
        if own:
            position += own
            outstanding += _COUNTS[lead] - 1
        else:
            position, children = _numbered_header(data, position)
            outstanding += children - 1
    if position > size:
        raise DecodeError(f"MessagePack ends after {size} bytes in the middle of a value")
    return position


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
    first, count = (1, _COUNTS[data[0]]) if _SIZES[data[0]] else _numbered_header(data, 0)
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
            wanted = f"{in_array}" if in_array == len(names) else f"{in_array} to {len(names)}"
            raise DecodeError(f"expected an array of {wanted} values; got {count}")
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
