"""Walks MessagePack without building values: finds where a value ends and cuts arrays and maps into their slots.

It reads what strict decoders refuse (bytes after the value, maps for arrays) and copes with hostile input:
no recursion, no allocation for lengths that are only claimed, time linear in the bytes given.
"""

from __future__ import annotations

from tampu.errors import DecodeError

#: The encoded None.
NIL = b"\xc0"

# For leading bytes whose header holds a number: how many bytes the number has, and what it counts.
_BYTES = 1  # bytes of the body
_CHILDREN = 2  # values that follow
_PAIRS = 3  # pairs of values that follow
_EXT = 4  # bytes of the body, plus one for the type

_NUMBERED: dict[int, tuple[int, int]] = {
    0xC4: (1, _BYTES),
    0xC5: (2, _BYTES),
    0xC6: (4, _BYTES),
    0xC7: (1, _EXT),
    0xC8: (2, _EXT),
    0xC9: (4, _EXT),
    0xD9: (1, _BYTES),
    0xDA: (2, _BYTES),
    0xDB: (4, _BYTES),
    0xDC: (2, _CHILDREN),
    0xDD: (4, _CHILDREN),
    0xDE: (2, _PAIRS),
    0xDF: (4, _PAIRS),
}
_FIXED_BODIES: dict[int, int] = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
}


def _size(lead: int) -> int:
    """Bytes of a value's own, when its leading byte alone tells; else 0."""
    if 0xA0 <= lead <= 0xBF:
        return 1 + (lead & 0x1F)
    if lead <= 0x9F or lead >= 0xE0:
        return 1
    return 1 + _FIXED_BODIES[lead] if lead in _FIXED_BODIES else 0


def _children(lead: int) -> int:
    """Values that follow as children, when the leading byte alone tells."""
    if 0x80 <= lead <= 0x8F:
        return 2 * (lead & 0x0F)
    return lead & 0x0F if 0x90 <= lead <= 0x9F else 0


# By leading byte: hostile input may hold a million values, so one look must do for most of them.
_SIZES = tuple(_size(lead) for lead in range(256))
_COUNTS = tuple(_children(lead) for lead in range(256))

#: Where the content of a str or bin begins.
_CONTENT_AT = {lead: 1 + _NUMBERED[lead][0] for lead in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB)} | dict.fromkeys(
    range(0xA0, 0xC0), 1
)


def _numbered_header(data: bytes, position: int) -> tuple[int, int]:
    """(position behind the value's own bytes, number of its children) where the header holds a number."""
    lead = data[position]
    if lead not in _NUMBERED:
        raise DecodeError(f"byte {position} is 0x{lead:02x}, which starts no MessagePack value")
    width, meaning = _NUMBERED[lead]
    position += 1 + width
    number = int.from_bytes(data[position - width : position], "big")
    if meaning == _BYTES:
        return position + number, 0
    if meaning == _EXT:
        return position + number + 1, 0
    return position, number if meaning == _CHILDREN else 2 * number


def end_of_value(data: bytes, position: int = 0) -> int:
    """The position right behind the value that starts at `position`."""
    size = len(data)
    outstanding = 1
    while outstanding:
        # Every value takes at least a byte, so the loop is bounded by the bytes that are there, not by those claimed.
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
    """Whether the value is an array."""
    return bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))


def is_map(data: bytes) -> bool:
    """Whether the value is a map."""
    return bool(data) and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))


def _children_of(data: bytes) -> tuple[int, int]:
    """(position of the first child, number of children) of an array or a map."""
    if not is_array(data) and not is_map(data):
        raise DecodeError("expected a MessagePack array or map")
    first, count = (1, _COUNTS[data[0]]) if _SIZES[data[0]] else _numbered_header(data, 0)
    if count > len(data) - first:
        raise DecodeError(f"MessagePack claims {count} values in {max(len(data) - first, 0)} bytes")
    return first, count


def count_of(data: bytes) -> int:
    """How many values an array claims to hold, or a map as keys and values."""
    return _children_of(data)[1]


def slots_of(data: bytes) -> list[bytes]:
    """The encoded children of an array (or of a map: key, value, key, value ...), ignoring bytes behind it."""
    position, count = _children_of(data)
    slots: list[bytes] = []
    for _ in range(count):
        end = end_of_value(data, position)
        slots.append(data[position:end])
        position = end
    return slots


def bin_content(slot: bytes) -> bytes | None:
    """The content of a bin that fills the slot exactly; None when the slot holds anything else."""
    is_bin = slot[:1] in (b"\xc4", b"\xc5", b"\xc6")
    return text_content(slot) if is_bin and end_of_value(slot) == len(slot) else None


def text_content(slot: bytes) -> bytes | None:
    """The content of a str or bin, given a slot as `slots_of` cuts them; None when it is neither."""
    start = _CONTENT_AT.get(slot[0])
    return None if start is None else slot[start:]
