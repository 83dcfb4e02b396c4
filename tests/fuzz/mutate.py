"""Makes new inputs out of old ones: bytes changed, moved, doubled and cut, and pieces that mean something."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

#: Longest input.
MAX_BYTES = 4096

#: First bytes of MessagePack values, numbers at the edges, and what the texts are made of.
PIECES = (
    *(bytes([lead]) for lead in range(0x80, 0x100)),
    *(b"\xcf" + value.to_bytes(8, "big") for value in (0, 2**31, 2**32, 2**53, 2**63, 2**64 - 1)),
    *(b"\xdd" + value.to_bytes(4, "big") for value in (0, 1, 2**16, 2**32 - 1)),
    b"\xcb\x7f\xf8\0\0\0\0\0\0",  # NaN
    b"\xcb\x7f\xf0\0\0\0\0\0\0",  # infinity
    *(b"id payload created_at_ms attempt retry backoff kind fixed Every Cron Skip FireAll original ts".split()),
    *(b"* / - , # L W ? + MON JAN 0 59 2099 @ : % ? & = [ ] // redis unix Z UTC -23:59".split()),
    *(b"1e309 nan inf -1 00 \xc3\xa9 \xed\xa0\x80 \xff".split()),
    b"|",
    b" ",
    b"\0",
    b"9" * 5000,
    b"9" * 30,
)


def mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Return an input made of one of the corpus."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randint(0, len(data))
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] = rng.randrange(256)
            case 1 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                data[at:at] = rng.choice(PIECES)
            case 3:
                data[at : at + rng.randint(1, 8)] = rng.choice(PIECES)
            case 4:
                del data[at : at + rng.randint(1, 8)]
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 32)]
            case 6:
                other = rng.choice(corpus)
                cut = rng.randint(0, len(other))
                data[at:] = other[cut:]
    return bytes(data[: MAX_BYTES * 2])
