"""The payload slot: a user's value as MessagePack, wrapped in a bin (the Python and Node form) or inline (Rust-typed).

Encoding is strict: a value that would not come back the same (Decimal, UUID, set, naive datetime, dataclass ...) is an
`EncodeError`. Tuples come back as lists, as everywhere in MessagePack.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import msgpack
import msgspec

from tampu.checks import refuse, shown
from tampu.errors import DecodeError, EncodeError
from tampu.wire.scan import bin_content

PayloadFormat = Literal["bin", "inline"]

#: MessagePack of None, wrapped: what an empty payload looks like on the wire.
NIL = b"\xc0"

_decoder = msgspec.msgpack.Decoder()


class _Packers(threading.local):
    """One packer per thread: a packer owns a buffer and must not be entered twice."""

    def __init__(self) -> None:
        # msgpack rather than msgspec: it refuses what would not come back the same, in C, at the cost msgspec plus a
        # check in Python would have twice (0.54 against 1.1 microseconds for a payload of 10 values).
        self.pack = msgpack.Packer(use_bin_type=True, datetime=True).pack


_packers = _Packers()


def check_payload_format(value: object, field: str = "payload_format") -> PayloadFormat:
    """'bin' or 'inline'."""
    if value == "bin" or value == "inline":
        return value
    raise refuse(field, value, "'bin' (what Python and Node peers read) or 'inline' (Rust-typed peers)")


def encode_value(value: Any) -> bytes:
    """A user's value as MessagePack; `EncodeError` when it has no faithful form."""
    try:
        packed: bytes = _packers.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(
            f"payload {shown(value)} has no faithful MessagePack form ({error}); allowed are None, bool, int of "
            "64 bits, float, str, bytes, list, dict and aware datetime, or set payload_type to say how a type is written"
        ) from error
    return packed


def decode_value(data: bytes) -> Any:
    """The value of MessagePack bytes; `DecodeError` when they are not exactly one value."""
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise DecodeError("MessagePack is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
        raise DecodeError(f"payload is not MessagePack: {error}") from error


def wrap_bin(data: bytes) -> bytes:
    """Bytes as a MessagePack bin with the smallest header."""
    size = len(data)
    if size < 0x100:
        return b"\xc4%c%b" % (size, data)
    if size < 0x10000:
        return b"\xc5%b%b" % (size.to_bytes(2, "big"), data)
    if size < 0x100000000:
        return b"\xc6%b%b" % (size.to_bytes(4, "big"), data)
    raise EncodeError(f"a payload holds at most 4294967295 bytes; got {size}")


def encode_slot(value: Any, payload_format: PayloadFormat = "bin") -> bytes:
    """The bytes of the payload slot for a user's value."""
    packed = encode_value(value)
    return wrap_bin(packed) if payload_format == "bin" else packed


def decode_slot(slot: bytes) -> Any:
    """The user's value in a payload slot of either format."""
    content = bin_content(slot)
    return decode_value(slot if content is None else content)


def slot_format(slot: bytes) -> PayloadFormat:
    """Which of the two formats a slot is in."""
    return "inline" if bin_content(slot[:1]) is None else "bin"
