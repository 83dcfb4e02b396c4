"""ULIDs: 48 bits of time in milliseconds and 80 random bits as 26 characters of Crockford's base 32.

Pure: the time and random bytes are arguments. Not monotonic within a millisecond, as in ChasquiMQ.
"""

from __future__ import annotations

import struct

from tampu.errors import DecodeError

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Latest time a ULID can hold.
MAX_TIME_MS = 2**48 - 1
#: Random bytes per id: the low 5 bits of each give one character.
RANDOM_BYTES = 16

#: Maps any random byte to a character; 256 is a multiple of 32, so all characters are equally likely.
_RANDOM_TO_CHARACTER = bytes(ord(ALPHABET[byte & 31]) for byte in range(256))
#: Pairs of characters, 10 bits each, so that a time needs 5 lookups.
_PAIRS = tuple(high + low for high in ALPHABET for low in ALPHABET)
_VALUES = {character: value for value, character in enumerate(ALPHABET)}


def encode_time(time_ms: int) -> str:
    """Return the 10 characters of the time part."""
    if not 0 <= time_ms <= MAX_TIME_MS:
        raise ValueError(f"the time of a ULID must be from 0 to {MAX_TIME_MS} ms; got {time_ms}")
    pairs = _PAIRS
    return (
        pairs[time_ms >> 40]
        + pairs[(time_ms >> 30) & 1023]
        + pairs[(time_ms >> 20) & 1023]
        + pairs[(time_ms >> 10) & 1023]
        + pairs[time_ms & 1023]
    )


def random_text(random: bytes) -> str:
    """Return one character for each random byte; an id takes `RANDOM_BYTES` of them."""
    return random.translate(_RANDOM_TO_CHARACTER).decode("ascii")


def encode_ulid(time_ms: int, random: bytes) -> str:
    """Return a ULID made from a time and `RANDOM_BYTES` random bytes."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"a ULID needs {RANDOM_BYTES} random bytes; got {len(random)}")
    return encode_time(time_ms) + random_text(random)


def encode_ulids(time_ms: int, random: bytes) -> list[str]:
    """Return one ULID for every `RANDOM_BYTES` bytes of `random`. Faster than `encode_ulid` for each."""
    if len(random) % RANDOM_BYTES:
        raise ValueError(f"ULIDs need a multiple of {RANDOM_BYTES} random bytes; got {len(random)}")
    count = len(random) // RANDOM_BYTES
    if not count:
        return []
    # One join and one split for all IDs is faster than Python code for each.
    parts = struct.unpack(f"{RANDOM_BYTES}s" * count, random.translate(_RANDOM_TO_CHARACTER))
    time = encode_time(time_ms).encode()
    return (time + (b"\n" + time).join(parts)).decode("ascii").split("\n")


def ulid_from_bits(time_ms: int, entropy: int) -> str:
    """Return the ULID of a time and 80 bits given as a number, for ids that must be reproducible."""
    return encode_time(time_ms) + "".join(ALPHABET[(entropy >> shift) & 31] for shift in range(75, -5, -5))


def decode_ulid_time(ulid: str) -> int:
    """Return the time of a ULID in epoch milliseconds. Raises `DecodeError` if the text is not a ULID."""
    if len(ulid) != 26:
        raise DecodeError(f"a ULID must have 26 characters; got {len(ulid)}")
    try:
        values = [_VALUES[character] for character in ulid]
    except KeyError as unknown:
        raise DecodeError(f"{unknown.args[0]!r} is not allowed in a ULID") from None
    time_ms = 0
    for value in values[:10]:
        time_ms = time_ms << 5 | value
    if time_ms > MAX_TIME_MS:
        raise DecodeError(f"{ulid} is after the latest time that a ULID can hold")
    return time_ms
