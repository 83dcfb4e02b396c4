"""Walks MessagePack without building values: finds where a value ends and cuts arrays and maps into their slots.

It reads what strict decoders refuse (bytes after the value, maps for arrays) and copes with hostile input:
no recursion, no allocation for lengths that are only claimed, time linear in the bytes given.
"""

from __future__ import annotations

from tampu.errors import DecodeError

# For every leading byte: how many bytes follow it in the header, how the length in them is meant, and the size
# of a body that is always the same.
_SIZED_BODY = 1  # the header's number is a count of bytes
_CHILDREN = 2  # ... of values
_PAIRS = 3  # ... of pairs of values
_EXT = 4  # ... of bytes, plus one for the type

_HEADERS: dict[int, tuple[int, int]] = {
    0xC4: (1, _SIZED_BODY),
    0xC5: (2, _SIZED_BODY),
    0xC6: (4, _SIZED_BODY),
    0xC7: (1, _EXT),
    0xC8: (2, _EXT),
    0xC9: (4, _EXT),
    0xD9: (1, _SIZED_BODY),
    0xDA: (2, _SIZED_BODY),
    0xDB: (4, _SIZED_BODY),
    0xDC: (2, _CHILDREN),
    0xDD: (4, _CHILDREN),
    0xDE: (2, _PAIRS),
    0xDF: (4, _PAIRS),
}
_FIXED_SIZES: dict[int, int] = {
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
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
}


def _header(data: bytes, position: int) -> tuple[int, int]:
    """(position behind the value's own bytes, number of values that follow as its children)."""
    if position >= len(data):
        raise DecodeError(f"MessagePack ends after {len(data)} bytes in the middle of a value")
    lead = data[position]
    position += 1
    children = 0
    if lead <= 0x7F or lead >= 0xE0:
        pass
    elif lead <= 0x8F:
        children = 2 * (lead & 0x0F)
    elif lead <= 0x9F:
        children = lead & 0x0F
    elif lead <= 0xBF:
        position += lead & 0x1F
    elif (fixed := _FIXED_SIZES.get(lead)) is not None:
        position += fixed
    elif (sized := _HEADERS.get(lead)) is not None:
        width, meaning = sized
        number = int.from_bytes(data[position : position + width], "big")
        position += width
        if meaning == _SIZED_BODY:
            position += number
        elif meaning == _EXT:
            position += number + 1
        else:
            children = number if meaning == _CHILDREN else 2 * number
    else:
        raise DecodeError(f"byte {position - 1} is 0x{lead:02x}, which starts no MessagePack value")
    if position > len(data):
        raise DecodeError(f"MessagePack ends after {len(data)} bytes in the middle of a value")
    return position, children


def end_of_value(data: bytes, position: int = 0) -> int:
    """The position right behind the value that starts at `position`."""
    outstanding = 1
    while outstanding:
        position, children = _header(data, position)
        outstanding += children - 1
        if outstanding > len(data) - position:  # every value takes at least one byte
            raise DecodeError(f"MessagePack claims {outstanding} more values in {len(data) - position} bytes")
    return position


def is_array(data: bytes) -> bool:
    """Whether the value is an array."""
    return bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))


def is_map(data: bytes) -> bool:
    """Whether the value is a map."""
    return bool(data) and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))


def slots_of(data: bytes) -> list[bytes]:
    """The encoded children of an array (or of a map: key, value, key, value ...), ignoring bytes behind it."""
    if not is_array(data) and not is_map(data):
        raise DecodeError("expected a MessagePack array or map")
    position, count = _header(data, 0)
    if count > len(data) - position:
        raise DecodeError(f"MessagePack claims {count} values in {len(data) - position} bytes")
    slots: list[bytes] = []
    for _ in range(count):
        end = end_of_value(data, position)
        slots.append(data[position:end])
        position = end
    return slots


def bin_content(slot: bytes) -> bytes | None:
    """The content of a bin value that fills the slot; None when the slot is no bin."""
    if not slot:
        return None
    lead = slot[0]
    if lead == 0xC4:
        return slot[2:]
    if lead == 0xC5:
        return slot[3:]
    if lead == 0xC6:
        return slot[5:]
    return None
