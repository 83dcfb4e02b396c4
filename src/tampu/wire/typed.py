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
from tampu.wire.map_keys import SAFE_BYTES, SET_OF_NUMBERS, SET_OF_TUPLES, may_have_slow_keys
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
    from collections.abc import Callable


#: Maximum number of values in a payload of up to 1 MiB, if its type has a Decimal (0.15 us each) or a Flag (3 us each).
MAX_DECIMALS = 65_536
MAX_FLAGS = 16_384
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
    info = msgspec.inspect.type_info(payload_type)
    has_sequence_keys = _has_part(info, _may_have_sequence_keys)
    has_number_keys = has_sequence_keys or _has_part(info, _may_have_number_keys)
    set_work = _set_work(info)
    max_values = _max_values(info)
    unchecked_bytes = SAFE_BYTES if set_work or max_values else LARGE_BYTES

    def check(packed: bytes) -> None:
        if has_sequence_keys or (has_number_keys and may_have_slow_keys(packed)):
            refuse_array_keys(packed)
        if len(packed) > unchecked_bytes:
            refuse_slow(packed, max_values, set_work)

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


def _has_part(info: msgspec.inspect.Type, is_such: Callable[[msgspec.inspect.Type], bool]) -> bool:
    """Return True if a type is such a type, or has a part that is one."""
    seen: set[int] = set()

    def look(part: Any) -> bool:
        if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            if id(part) in seen:
                return False
            seen.add(id(part))
            if isinstance(part, msgspec.inspect.Type) and is_such(part):
                return True
            return any(look(getattr(part, name)) for name in part.__struct_fields__)
        return isinstance(part, list | tuple) and any(map(look, part))

    return look(info)


def _may_have_sequence_keys(part: msgspec.inspect.Type) -> bool:
    """Return True for a map with such keys, and for a part without a type, which can hold any map."""
    return _has_no_type(part) or (isinstance(part, msgspec.inspect.DictType) and _holds_sequence(part.key_type))


def _may_have_number_keys(part: msgspec.inspect.Type) -> bool:
    return _has_no_type(part) or (isinstance(part, msgspec.inspect.DictType) and _holds_number(part.key_type))


def _has_no_type(part: msgspec.inspect.Type) -> bool:
    return isinstance(part, msgspec.inspect.AnyType | msgspec.inspect.CustomType | msgspec.inspect.RawType)


def _set_work(info: msgspec.inspect.Type) -> float:
    """Return the work of the largest set that a value of this type can hold, relative to the square of its size."""
    if _has_part(info, lambda part: _is_set(part) and _holds_sequence(part.item_type)):
        return SET_OF_TUPLES
    return SET_OF_NUMBERS if _has_part(info, lambda part: _is_set(part) and _holds_number(part.item_type)) else 0


def _is_set(part: msgspec.inspect.Type) -> TypeGuard[msgspec.inspect.SetType | msgspec.inspect.FrozenSetType]:
    return isinstance(part, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType)


def _max_values(info: msgspec.inspect.Type) -> int | None:
    """Return how many values a payload of up to 1 MiB may have; None if values of this type are quick to build."""
    if _has_part(info, _is_slow_enum):
        return MAX_FLAGS
    return MAX_DECIMALS if _has_part(info, _is_decimal) else None


def _is_decimal(part: msgspec.inspect.Type) -> bool:
    return isinstance(part, msgspec.inspect.DecimalType)


def _is_slow_enum(part: msgspec.inspect.Type) -> bool:
    """Return True for a Flag, and for an Enum with its own `_missing_`: msgspec calls it for each unknown value."""
    return isinstance(part, msgspec.inspect.EnumType) and getattr_static(part.cls, "_missing_") is not _NO_MISSING


def _holds_sequence(key: msgspec.inspect.Type) -> bool:
    sequences = (msgspec.inspect.CollectionType, msgspec.inspect.TupleType, msgspec.inspect.NamedTupleType)
    structs = (msgspec.inspect.StructType, msgspec.inspect.DataclassType)
    return any(isinstance(kind, (*sequences, *structs)) for kind in _kinds(key))


def _holds_number(key: msgspec.inspect.Type) -> bool:
    return not all(isinstance(kind, msgspec.inspect.StrType | msgspec.inspect.BytesType) for kind in _kinds(key))


def _kinds(part: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return part.types if isinstance(part, msgspec.inspect.UnionType) else (part,)


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
