"""ULIDs: 48 bits of time in milliseconds and 80 random bits as 26 characters of Crockford's base 32.

Pure: time and random bytes come in as arguments. Not monotonic within one millisecond, as on the wire.
"""

from __future__ import annotations

from tampu.errors import DecodeError

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Largest time a ULID can hold.
MAX_TIME_MS = 2**48 - 1
#: Random bytes one id consumes: each byte gives one character, its low 5 bits.
RANDOM_BYTES = 16

#: Maps any random byte to a character; 256 is a multiple of 32, so all characters are equally likely.
_RANDOM_TO_CHARACTER = bytes(ord(ALPHABET[byte & 31]) for byte in range(256))
#: Characters of 10 bits each, so that a time needs 5 look-ups.
_PAIRS = tuple(high + low for high in ALPHABET for low in ALPHABET)
_VALUES = {character: value for value, character in enumerate(ALPHABET)}


def encode_time(time_ms: int) -> str:
    """The 10 characters of the time part."""
    if not 0 <= time_ms <= MAX_TIME_MS:
        raise ValueError(f"a ULID holds times from 0 to {MAX_TIME_MS} ms; got {time_ms}")
    pairs = _PAIRS
    return (
        pairs[time_ms >> 40]
        + pairs[(time_ms >> 30) & 1023]
        + pairs[(time_ms >> 20) & 1023]
        + pairs[(time_ms >> 10) & 1023]
        + pairs[time_ms & 1023]
    )


def random_text(random: bytes) -> str:
    """The characters of random parts: one for each byte, so `RANDOM_BYTES` of them make one id's."""
    return random.translate(_RANDOM_TO_CHARACTER).decode("ascii")


def encode_ulid(time_ms: int, random: bytes) -> str:
    """One ULID from a time and `RANDOM_BYTES` random bytes."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"a ULID takes {RANDOM_BYTES} random bytes; got {len(random)}")
    return encode_time(time_ms) + random_text(random)


def encode_ulids(time_ms: int, random: bytes) -> list[str]:
    """As many ULIDs as `random` has bytes for: one translation for all of them, one slice each."""
    if len(random) % RANDOM_BYTES:
        raise ValueError(f"ULIDs take {RANDOM_BYTES} random bytes each; got {len(random)}")
    time_part = encode_time(time_ms)
    text = random_text(random)
    return [time_part + text[start : start + RANDOM_BYTES] for start in range(0, len(text), RANDOM_BYTES)]


def ulid_from_bits(time_ms: int, entropy: int) -> str:
    """A ULID whose 80 bits are given as a number, for ids that must be the same wherever they are made."""
    return encode_time(time_ms) + "".join(ALPHABET[(entropy >> shift) & 31] for shift in range(75, -5, -5))


def decode_ulid_time(ulid: str) -> int:
    """The time of a ULID in milliseconds; `DecodeError` when the text is no ULID."""
    if len(ulid) != 26:
        raise DecodeError(f"a ULID has 26 characters; got {len(ulid)}")
    try:
        values = [_VALUES[character] for character in ulid]
    except KeyError as unknown:
        raise DecodeError(f"{unknown.args[0]!r} is no character of a ULID") from None
    time_ms = 0
    for value in values[:10]:
        time_ms = time_ms << 5 | value
    if time_ms > MAX_TIME_MS:
        raise DecodeError(f"{ulid} is beyond the last time a ULID can hold")
    return time_ms
