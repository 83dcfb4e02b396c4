"""The payload slot: a value as MessagePack, wrapped in a bin (the Python and Node form) or inline (Rust-typed).

Encoding is strict: a value that would not decode to an equal value (Decimal, UUID, set, naive datetime, dataclass ...)
raises `EncodeError`. Tuples decode to lists, as always in MessagePack. Lists, tuples and dicts are refused as keys of a
dict, in both directions; see `refuse_array_keys`.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import msgpack
import msgspec

from tampu.base.checks import invalid, shown
from tampu.errors import DecodeError, EncodeError, ResultNotStored
from tampu.wire.scan import REFUSALS, end_of_value

if TYPE_CHECKING:
    from collections.abc import Sequence

PayloadFormat = Literal["bin", "inline"]

#: Deepest nesting of lists and dicts that is accepted when it may exhaust a reader's stack: on Python 3.11 decoding
#: fails at 1000 levels, including those of its callers. Writers on later versions keep to it: readers may be older.
MAX_NESTING = 512
#: msgpack skips values of up to this number of levels, on every version of Python.
_SKIPPED_LEVELS = 1024
_CONTAINERS = (list, tuple, dict)
#: All bytes except those that start a list, a dict or an extension.
_STARTS_PLAIN = bytes({*range(256)} - {*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)})
#: Bytes that start an extension, such as a datetime.
_EXT_LEADS = bytes((*range(0xC7, 0xCA), *range(0xD4, 0xD9)))
#: Payloads up to this size, in bytes, are checked by their bytes, larger ones by the types of their values. In a
#: bulk of 100-byte payloads, checking the bytes takes 0.05 us each, the types 0.35 us; at this size, both take as long.
SHORT_BYTES = 384
#: Types of values that hold no others.
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
#: All bytes except those that start a list or dict that is not empty.
_OPENS_NO_LEVEL = bytes({*range(256)} - {*range(0x81, 0x90), *range(0x91, 0xA0), *range(0xDC, 0xE0)})

#: First bytes of a bin, and therefore of a payload in format 'bin'.
BIN_LEADS = (b"\xc4", b"\xc5", b"\xc6")

#: Errors of msgpack's decoder: the bytes are not MessagePack, or nested more than 1024 levels deep.
_NOT_MSGPACK = (ValueError, OverflowError, RecursionError, msgpack.UnpackException)

_first_byte = itemgetter(0)
_decode_bin = msgspec.msgpack.Decoder(bytes).decode
_unpack = partial(msgpack.unpackb, strict_map_key=False, timestamp=3, ext_hook=msgspec.msgpack.Ext)


class _Packers(threading.local):
    """One packer per thread: a packer owns a buffer and is not reentrant."""

    def __init__(self) -> None:
        # msgpack instead of msgspec: it rejects unfaithful values in C, in half the time that msgspec plus a check in
        # Python takes (0.54 against 1.1 microseconds for a payload of 10 values).
        self.pack = msgpack.Packer(use_bin_type=True, datetime=True).pack


_packers = _Packers()


def check_payload_format(value: object, field: str = "payload_format") -> PayloadFormat:
    """Return `value` if it is 'bin' or 'inline', else raise `ConfigError`."""
    if value == "bin" or value == "inline":
        return value
    raise invalid(field, value, "'bin' (for Python and Node) or 'inline' (for Rust-typed workers)")


def encode_value(value: Any) -> bytes:
    """Encode a value as MessagePack. Raises `EncodeError` if it would not decode to an equal value."""
    try:
        packed: bytes = _packers.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        raise EncodeError(
            f"payload {shown(value)} has no faithful MessagePack form ({error}); allowed are None, bool, 64-bit int, "
            "float, str, bytes, list, dict and aware datetime; for other types set payload_type"
        ) from error
    if len(packed) <= SHORT_BYTES and len(packed.translate(None, _STARTS_PLAIN)) <= 1 and packed[0] not in _EXT_LEADS:
        return packed  # at most one list or dict, the payload itself
    if packed[0] in _EXT_LEADS or (isinstance(value, _CONTAINERS) and not _is_flat(value)):
        _check(value, packed)
    return packed


def encode_values(values: Sequence[Any]) -> list[bytes]:
    """Encode many values, checking all of them in one pass if they are flat. Raises `EncodeError` for any of them."""
    try:
        bodies = [*map(_packers.pack, values)]
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError):
        return [*map(encode_value, values)]  # its error says why
    if _are_short_and_flat(bodies):
        return bodies
    if {dict}.issuperset(map(type, values)):
        children = chain(chain.from_iterable(map(dict.values, values)), chain.from_iterable(values))
        if _PLAIN.issuperset(map(type, children)):
            return bodies
    for value, packed in zip(values, bodies, strict=True):
        if packed[0] in _EXT_LEADS or (isinstance(value, _CONTAINERS) and not _is_flat(value)):
            _check(value, packed)
    return bodies


def _are_short_and_flat(bodies: list[bytes]) -> bool:
    """Return True if no payload holds a list, dict or extension (it may itself be one); False if that is unclear."""
    joined = b"".join(bodies)
    if len(joined) > SHORT_BYTES * len(bodies):
        return False
    # Only first bytes may start one: then all payloads have as many of these bytes as their first bytes alone.
    firsts = bytes(map(_first_byte, bodies))
    if len(firsts.translate(None, _EXT_LEADS)) < len(firsts):
        return False  # a datetime
    return len(joined.translate(None, _STARTS_PLAIN)) == len(firsts.translate(None, _STARTS_PLAIN))


def _check(value: Any, packed: bytes) -> None:
    """Raise `EncodeError` for a value that readers would refuse: a list, a dict, or a datetime out of range."""
    why: object = f"it has more than {MAX_NESTING} levels" if is_nested_too_deeply(packed) else None
    try:
        refuse_array_keys(packed)
    except DecodeError as error:
        why = why or error
    if why:
        raise EncodeError(f"payload {shown(value)} has no faithful MessagePack form: {why}")


def _is_flat(value: Any) -> bool:
    """Return True if keys and values are plain: such a payload, the usual one, needs no closer look."""
    if isinstance(value, dict) and not _PLAIN.issuperset(map(type, value.values())):
        return False
    return _PLAIN.issuperset(map(type, value))


def refuse_array_keys(packed: bytes) -> None:
    """Raise `DecodeError` if a key of a map is an array or a map.

    Python hashes -1 and -2 alike, so arrays of them all collide: as keys, 262 KB of them took 16 s to decode.
    """
    decode_value(packed)


def is_nested_too_deeply(packed: bytes) -> bool:
    """Return True if an encoded value has more than `MAX_NESTING` levels."""
    if len(packed) <= MAX_NESTING:
        return False
    if len(packed) < 4096 and len(packed.translate(None, _OPENS_NO_LEVEL)) < MAX_NESTING:
        return False  # the quickest check, for nearly all small payloads
    try:
        end_of_value(b"\x91" * (_SKIPPED_LEVELS - MAX_NESTING) + packed)
    except DecodeError:
        return True
    return False


def decode_value(data: bytes) -> Any:
    """Decode MessagePack. Raises `DecodeError` unless the bytes are exactly one value."""
    # msgpack instead of msgspec, which makes tuples of arrays in keys: msgpack makes lists, and stops at the first one.
    # Timestamps become datetimes: msgpack's own type adds seconds and nanoseconds, a hash that is easy to make collide.
    try:
        return _unpack(data)
    except TypeError:
        raise DecodeError(
            "payload has an array, a map or an extension as the key of a map; use text or numbers"
        ) from None
    except _NOT_MSGPACK as error:
        raise _no_value(error) from error


def _no_value(error: Exception) -> DecodeError:
    if isinstance(error, RecursionError | msgpack.StackError):
        return DecodeError("payload is nested too deeply")
    return DecodeError(f"payload is not MessagePack: {error or type(error).__name__}")


def wrap_bin(data: bytes) -> bytes:
    """Wrap bytes in a MessagePack bin with the shortest header."""
    return bin_header(len(data)) + data


def bin_header(size: int) -> bytes:
    """Return the shortest header of a MessagePack bin of `size` bytes."""
    if size < 0x100:
        return b"\xc4%c" % size
    if size < 0x10000:
        return b"\xc5" + size.to_bytes(2, "big")
    if size < 0x100000000:
        return b"\xc6" + size.to_bytes(4, "big")
    raise EncodeError(f"a payload must be at most 4294967295 bytes; got {size}")


def encode_slot(value: Any, payload_format: PayloadFormat = "bin") -> bytes:
    """Encode a value as a payload slot."""
    packed = encode_value(value)
    if payload_format == "bin":
        return wrap_bin(packed)
    if packed[:1] in BIN_LEADS:  # readers would mistake it for a payload in format 'bin'
        raise EncodeError(f"payload {shown(value)} cannot be written inline: bytes need payload_format 'bin'")
    return packed


def decode_slot(slot: bytes) -> Any:
    """Decode the value in a payload slot of either format."""
    try:
        packed = _decode_bin(slot) if slot[:1] in BIN_LEADS else slot
    except REFUSALS as error:
        raise _no_value(error) from error
    return decode_value(packed)


def slot_format(slot: bytes) -> PayloadFormat:
    """Return the format of a payload slot."""
    return "bin" if slot[:1] in BIN_LEADS else "inline"


#: A result is the return value as MessagePack. None is stored as nil, which distinguishes a finished job from a pending
#: one; other implementations read it as None.
encode_result = encode_value
#: Type and first bytes of the extension that is stored instead of a result that cannot be stored.
_NO_RESULT = b"\x74tampu:no-result "


def encode_no_result(why: str) -> bytes:
    """Return what is stored instead of the result of a job that succeeded, if the result cannot be stored."""
    content = _NO_RESULT + why.encode(errors="replace")[:1000]
    return b"\xc8" + (len(content) - 1).to_bytes(2, "big") + content


def is_no_result(packed: bytes) -> bool:
    """Return True if `encode_no_result` made it."""
    return packed[:1] == b"\xc8" and packed.startswith(_NO_RESULT, 3)


def decode_result(packed: bytes) -> Any:
    """Decode a result. Raises `ResultNotStored` if the job's result could not be stored."""
    if is_no_result(packed):
        why = packed[3 + len(_NO_RESULT) :].decode(errors="replace")
        raise ResultNotStored(f"the job succeeded, but its result was not stored: {why}")
    return decode_value(packed)
