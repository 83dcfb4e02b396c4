"""The payload slot: a user's value as MessagePack, wrapped in a bin (the Python and Node form) or inline (Rust-typed).

Encoding is strict: a value that would not come back the same (Decimal, UUID, set, naive datetime, dataclass ...) is an
`EncodeError`. Tuples come back as lists, as everywhere in MessagePack.
"""

from __future__ import annotations

import reprlib
import threading
from itertools import chain
from typing import Any, Literal

import msgpack
import msgspec

from tampu.base.checks import invalid
from tampu.errors import DecodeError, EncodeError
from tampu.wire.scan import REFUSALS

PayloadFormat = Literal["bin", "inline"]

#: Deepest nesting of lists and dicts that is written where readers recurse on the interpreter's stack (Python 3.11):
#: they give up at 1000 levels, less those their callers use. Later versions read all that the packer writes, 1024.
MAX_NESTING = 512
_LEVELS_TO_SPARE = b"\x91" * (1000 - MAX_NESTING)
_CONTAINERS = (list, tuple, dict)
#: All bytes but those that start a list or dict with something in it.
_OPENS_NO_LEVEL = bytes({*range(256)} - {*range(0x81, 0x90), *range(0x91, 0xA0), *range(0xDC, 0xE0)})

#: What a bin starts with, and so a payload that is wrapped in one.
_BIN_LEADS = (b"\xc4", b"\xc5", b"\xc6")

_decode = msgspec.msgpack.Decoder().decode
_decode_bin = msgspec.msgpack.Decoder(bytes).decode
_skip = msgspec.msgpack.Decoder(msgspec.Raw).decode

# A payload may be huge, or nested deeper than repr can follow: this shows only as much of it as a message can hold.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 80


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
    raise invalid(field, value, "'bin' (what Python and Node peers read) or 'inline' (Rust-typed peers)")


def encode_value(value: Any) -> bytes:
    """A user's value as MessagePack; `EncodeError` when it has no faithful form."""
    try:
        packed: bytes = _packers.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        raise EncodeError(
            f"payload {_shown(value)} has no faithful MessagePack form ({error}); allowed are None, bool, int of "
            "64 bits, float, str, bytes, list, dict and aware datetime; payload_type says how other types are written"
        ) from error
    if len(packed) > MAX_NESTING and isinstance(value, _CONTAINERS) and _is_nested_too_deeply(packed, value):
        raise EncodeError(
            f"payload {_shown(value)} has no faithful MessagePack form: it has more than {MAX_NESTING} levels"
        )
    return packed


def _is_nested_too_deeply(packed: bytes, value: Any) -> bool:
    # Two looks in C, one cheaper for small payloads, the other for large ones, spare nearly all of them the third.
    if len(packed) < 4096 and len(packed.translate(None, _OPENS_NO_LEVEL)) < MAX_NESTING:
        return False
    try:
        _skip(_LEVELS_TO_SPARE + packed)
    except RecursionError:
        pass  # too deep, or it is the caller's own stack that left no room
    else:
        return False
    level = [value]
    for _ in range(MAX_NESTING):
        parents = (parent.values() if isinstance(parent, dict) else parent for parent in level)
        level = [child for child in chain.from_iterable(parents) if isinstance(child, _CONTAINERS)]
        if not level:
            return False
    return True


def _shown(value: object) -> str:
    try:
        return _brief.repr(value)
    except Exception:  # an int of over 4300 digits, or a repr of the user's own that fails
        return f"of type {type(value).__name__}"


def decode_value(data: bytes) -> Any:
    """The value of MessagePack bytes; `DecodeError` when they are not exactly one value."""
    try:
        return _decode(data)
    except REFUSALS as error:
        raise _no_value(error) from error


def _no_value(error: Exception) -> DecodeError:
    if isinstance(error, RecursionError):
        return DecodeError("payload is nested too deeply")
    return DecodeError(f"payload is not MessagePack: {error}")


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
    if payload_format == "bin":
        return wrap_bin(packed)
    if packed[:1] in _BIN_LEADS:  # every reader would take these bytes for a payload in format 'bin'
        raise EncodeError(f"payload {_shown(value)} cannot be written inline: bytes need payload_format 'bin'")
    return packed


def decode_slot(slot: bytes) -> Any:
    """The user's value in a payload slot of either format."""
    try:
        return _decode(_decode_bin(slot) if slot[:1] in _BIN_LEADS else slot)
    except REFUSALS as error:
        raise _no_value(error) from error


def slot_format(slot: bytes) -> PayloadFormat:
    """Which of the two formats a slot is in."""
    return "bin" if slot[:1] in _BIN_LEADS else "inline"


#: A result is stored as the MessagePack of the returned value. None is stored as nil, so that "finished" and "not yet"
#: differ; other implementations read it as None.
encode_result = encode_value
decode_result = decode_value
