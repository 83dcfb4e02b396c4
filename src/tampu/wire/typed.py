"""Typed payloads: encode values of one type, and check them when they are decoded.

Supports dataclasses, msgspec Structs, TypedDicts and everything else that msgspec does, and pydantic models, alone or
inside the others, if pydantic is installed.
"""

from __future__ import annotations

import sys
from enum import Enum
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from tampu.base.checks import shown
from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.map_keys import SAFE_BYTES, SET_OF_NUMBERS, SET_OF_OBJECTS, SET_OF_TUPLES, may_have_slow_keys
from tampu.wire.payload import (
    LARGE_BYTES,
    MAX_NESTING,
    decode_value,
    encode_value,
    is_nested_too_deeply,
    refuse_array_keys,
    refuse_slow,
    slot_format,
    without_gc,
)
from tampu.wire.scan import bin_content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: Maximum number of values in a payload of up to 1 MiB, if its type has a Decimal (0.15 us each) or a Flag with few
#: members (3 us each; with 60 members 13 us, so fewer are allowed).
MAX_DECIMALS = 65_536
MAX_FLAGS = 16_384
#: Maximum number of values in a payload of up to 1 MiB, if its type has a set: a million of them take 0.15 s.
MAX_SET_VALUES = 262_144
#: Maximum sum of the bytes below each level of a payload, for a type with tagged unions, and the number of levels
#: that are always allowed.
MAX_SKIPPED_BYTES = 16 << 20
MIN_TAGGED_LEVELS = 16
#: Types that text or bytes become, and whose hashes are known.
_FROM_TEXT = (msgspec.inspect.UUIDType, msgspec.inspect.DecimalType)
#: `_missing_` of an Enum that does not define it.
_NO_MISSING = getattr_static(Enum, "_missing_")


class TypedPayload:
    """Encodes and decodes payloads of `payload_type`."""

    __slots__ = ("_read", "_write", "payload_type")

    def __init__(self, payload_type: Any) -> None:
        self.payload_type = payload_type
        if is_pydantic(payload_type):
            self._write, self._read = _pydantic_codec(payload_type)
        else:
            self._write, self._read = _msgspec_codec(payload_type)

    def encode(self, value: Any) -> bytes:
        """Encode a value as MessagePack. Raises `EncodeError` if it is not of the type."""
        return self._write(value)

    def decode_slot(self, slot: bytes) -> Any:
        """Decode the value in a payload slot of either format. Raises `DecodeError` if it does not fit the type."""
        content = bin_content(slot)
        return self._read(slot if content is None else content)


def inline_only(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return `encode` for format 'inline', which rejects bytes: readers would mistake them for format 'bin'."""

    def write(value: Any) -> bytes:
        packed = encode(value)
        if slot_format(packed) == "bin":
            raise EncodeError(f"payload {shown(value)} cannot be written inline: bytes need payload_format 'bin'")
        return packed

    return write


def _name(payload_type: Any) -> str:
    return getattr(payload_type, "__name__", str(payload_type))


def is_pydantic(payload_type: Any) -> bool:
    """Return whether a type is a pydantic model."""
    pydantic = sys.modules.get("pydantic")  # no model can exist before pydantic is imported
    return pydantic is not None and isinstance(payload_type, type) and issubclass(payload_type, pydantic.BaseModel)


def _msgspec_codec(payload_type: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    try:
        read_packed = msgspec.msgpack.Decoder(payload_type, dec_hook=_from_plain).decode
    except TypeError as error:
        raise ConfigError(f"payload_type {_name(payload_type)} cannot be encoded as MessagePack: {error}") from error
    pack = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
    check = _check_of(msgspec.inspect.type_info(payload_type))

    def write(value: Any) -> bytes:
        try:
            packed = pack(value)
            if is_nested_too_deeply(packed):
                raise ValueError(f"it has more than {MAX_NESTING} levels")
            check(packed)
            # Decode it as a check: a payload that a worker would reject must not be sent.
            without_gc(read_packed, packed) if len(packed) > LARGE_BYTES else read_packed(packed)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EncodeError(f"payload {shown(value)} is not a {_name(payload_type)}: {error}") from error
        return packed

    def read(packed: bytes) -> Any:
        check(packed)
        try:
            return without_gc(read_packed, packed) if len(packed) > LARGE_BYTES else read_packed(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, RecursionError) as error:
            raise DecodeError(f"payload is not a {_name(payload_type)}: {error}") from error

    return write, read


def _check_of(info: msgspec.inspect.Type) -> Callable[[bytes], None]:
    """Return a function that raises `DecodeError` for payloads that would take too long to decode to this type."""
    parts = _parts_of(info)
    has_sequence_keys = any(map(_may_have_sequence_keys, parts))
    has_number_keys = has_sequence_keys or any(map(_may_have_number_keys, parts))
    hashes_text = any(map(_hashes_text, parts))
    set_work = max(map(_set_work, parts), default=0)
    max_values = _max_values(parts, has_sets=set_work > 0)
    unchecked_bytes = SAFE_BYTES if set_work or max_values or hashes_text else LARGE_BYTES

    has_tagged_union = any(map(_is_tagged_union, parts))

    def check(packed: bytes) -> None:
        if has_tagged_union and len(packed) > LARGE_BYTES:
            # The tag may come last: then all levels below it are skipped, and read again, on every level.
            most = min(MAX_NESTING, max(MIN_TAGGED_LEVELS, MAX_SKIPPED_BYTES // len(packed)))
            if is_nested_too_deeply(packed, most):
                raise DecodeError(
                    f"payload of {len(packed):,} bytes has more than {most} levels, the maximum at this size for a "
                    "type with tagged unions"
                )
        checks_keys = has_sequence_keys or (has_number_keys and may_have_slow_keys(packed))
        if len(packed) > unchecked_bytes:
            refuse_slow(packed, max_values, set_work, hashes_text=hashes_text, checks_keys=checks_keys)
        elif checks_keys:
            refuse_array_keys(packed)

    return check


def _parts_of(info: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """Return a type and the types of all its parts, each once."""
    parts: dict[int, msgspec.inspect.Type] = {}

    def look(part: Any) -> None:
        if isinstance(part, msgspec.inspect.Type):
            if id(part) in parts:
                return  # a type that contains itself
            parts[id(part)] = part
        if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            for name in part.__struct_fields__:
                look(getattr(part, name))
        elif isinstance(part, list | tuple):
            for one in part:
                look(one)

    look(info)
    return [*parts.values()]


def _is_tagged_union(part: msgspec.inspect.Type) -> bool:
    return isinstance(part, msgspec.inspect.UnionType) and any(
        isinstance(kind, msgspec.inspect.StructType) and kind.tag is not None and not kind.array_like
        for kind in part.types
    )


def _may_have_sequence_keys(part: msgspec.inspect.Type) -> bool:
    """Return True for a map with such keys, and for a part without a type, which can hold any map."""
    return _has_no_type(part) or (isinstance(part, msgspec.inspect.DictType) and _holds_sequence(part.key_type))


def _may_have_number_keys(part: msgspec.inspect.Type) -> bool:
    return _has_no_type(part) or (isinstance(part, msgspec.inspect.DictType) and _holds_number(part.key_type))


def _has_no_type(part: msgspec.inspect.Type) -> bool:
    return isinstance(part, msgspec.inspect.AnyType | msgspec.inspect.CustomType | msgspec.inspect.RawType)


def _set_work(part: msgspec.inspect.Type) -> float:
    """Return the work of a set of this type; 0 for other types and for sets of text."""
    if not _is_set(part):
        return 0
    if _holds_object(part.item_type):
        return SET_OF_OBJECTS
    return SET_OF_TUPLES if _holds_sequence(part.item_type) else SET_OF_NUMBERS if _holds_number(part.item_type) else 0


def _is_set(part: msgspec.inspect.Type) -> TypeGuard[msgspec.inspect.SetType | msgspec.inspect.FrozenSetType]:
    return isinstance(part, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType)


def _max_values(parts: list[msgspec.inspect.Type], *, has_sets: bool) -> int | None:
    """Return how many values a payload of up to 1 MiB may have; None if values of this type are quick to build."""
    if members := [len(part.cls.__members__) for part in parts if _is_slow_enum(part)]:
        return MAX_FLAGS * 3 // (3 + max(members) // 5)
    if any(isinstance(part, msgspec.inspect.DecimalType) for part in parts):
        return MAX_DECIMALS
    return MAX_SET_VALUES if has_sets else None


def _is_slow_enum(part: msgspec.inspect.Type) -> TypeGuard[msgspec.inspect.EnumType]:
    """Return True for a Flag, and for an Enum with its own `_missing_`: msgspec calls it for each unknown value."""
    return isinstance(part, msgspec.inspect.EnumType) and getattr_static(part.cls, "_missing_") is not _NO_MISSING


def _hashes_text(part: msgspec.inspect.Type) -> bool:
    """Return True for a set or a map in which text or bytes become UUIDs or Decimals, whose hashes are known."""
    if isinstance(part, msgspec.inspect.DictType):
        return any(isinstance(kind, _FROM_TEXT) for kind in _kinds(part.key_type))
    return _is_set(part) and any(isinstance(kind, _FROM_TEXT) for kind in _kinds(part.item_type))


def _holds_object(key: msgspec.inspect.Type) -> bool:
    return any(isinstance(kind, msgspec.inspect.StructType | msgspec.inspect.DataclassType) for kind in _kinds(key))


def _holds_sequence(key: msgspec.inspect.Type) -> bool:
    """Return True for arrays and objects, and for parts without a type, which can be arrays."""
    sequences = (msgspec.inspect.CollectionType, msgspec.inspect.TupleType, msgspec.inspect.NamedTupleType)
    return _holds_object(key) or any(isinstance(kind, sequences) or _has_no_type(kind) for kind in _kinds(key))


def _holds_number(key: msgspec.inspect.Type) -> bool:
    return not all(isinstance(kind, msgspec.inspect.StrType | msgspec.inspect.BytesType) for kind in _kinds(key))


def _kinds(part: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yield the types of a union, without the notes of `Annotated`."""
    if isinstance(part, msgspec.inspect.Metadata):
        yield from _kinds(part.type)
    elif isinstance(part, msgspec.inspect.UnionType):
        for kind in part.types:
            yield from _kinds(kind)
    else:
        yield part


def convert(value: Any, payload_type: Any) -> Any:
    """Convert a value that was decoded without a type. Raises `DecodeError` if it does not fit."""
    try:
        return msgspec.convert(value, payload_type, dec_hook=_from_plain)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise DecodeError(f"value is not a {_name(payload_type)}: {error}") from error


def _to_plain(value: Any) -> Any:
    """Encode a value of a type that msgspec does not support."""
    if is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no MessagePack form")


def _from_plain(wanted: Any, value: Any) -> Any:
    """Decode a value to a type that msgspec does not support."""
    if is_pydantic(wanted):
        return wanted.model_validate(value)
    return value  # msgspec checks its type


def _pydantic_codec(payload_type: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    def write(value: Any) -> bytes:
        try:
            return encode_value(payload_type.model_validate(value).model_dump(mode="json"))
        except ValueError as error:  # includes pydantic's ValidationError
            raise EncodeError(f"payload {shown(value)} is not a {_name(payload_type)}: {error}") from error

    def read(packed: bytes) -> Any:
        value = decode_value(packed)
        try:
            return payload_type.model_validate(value)
        except ValueError as error:
            raise DecodeError(f"payload is not a {_name(payload_type)}: {error}") from error

    return write, read
