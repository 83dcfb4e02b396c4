"""Typed payloads: encode values of one type, and check them when they are decoded.

Supports dataclasses, msgspec Structs, TypedDicts and everything else that msgspec does, and pydantic models, alone or
inside the others, if pydantic is installed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.base.checks import shown
from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.payload import (
    MAX_NESTING,
    decode_value,
    encode_value,
    is_nested_too_deeply,
    refuse_array_keys,
    slot_format,
)
from tampu.wire.scan import bin_content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    #: Functions that encode a value, decode a payload, and convert a plain value.
    _Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any], Callable[[Any], Any]]

#: Types that can hold any map, and types that are arrays or maps when they are keys.
_UNTYPED = (msgspec.inspect.AnyType, msgspec.inspect.CustomType)
_ARRAYS = (
    *(msgspec.inspect.CollectionType, msgspec.inspect.TupleType, msgspec.inspect.NamedTupleType),
    *(msgspec.inspect.StructType, msgspec.inspect.DataclassType),
)


class TypedPayload:
    """Encodes and decodes payloads of `payload_type`."""

    __slots__ = ("_convert", "_read", "_write", "payload_type")

    def __init__(self, payload_type: Any) -> None:
        self.payload_type = payload_type
        if is_pydantic(payload_type):
            self._write, self._read, self._convert = _pydantic_codec(payload_type)
        else:
            self._write, self._read, self._convert = _msgspec_codec(payload_type)

    def encode(self, value: Any) -> bytes:
        """Encode a value as MessagePack. Raises `EncodeError` if it is not of the type."""
        return self._write(value)

    def decode_slot(self, slot: bytes) -> Any:
        """Decode the value in a payload slot of either format. Raises `DecodeError` if it does not fit the type."""
        content = bin_content(slot)
        return self._read(slot if content is None else content)

    def convert(self, value: Any) -> Any:
        """Convert a value that was decoded without a type. Raises `DecodeError` if it does not fit the type."""
        return self._convert(value)


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


def _msgspec_codec(payload_type: Any) -> _Codec:
    try:
        read_packed = msgspec.msgpack.Decoder(payload_type, dec_hook=_from_plain).decode
    except TypeError as error:
        raise ConfigError(f"payload_type {_name(payload_type)} cannot be encoded as MessagePack: {error}") from error
    pack = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
    checks_keys = _may_have_array_keys(payload_type)

    def write(value: Any) -> bytes:
        try:
            packed = pack(value)
            if is_nested_too_deeply(packed):
                raise ValueError(f"it has more than {MAX_NESTING} levels")
            if checks_keys:
                refuse_array_keys(packed)
            read_packed(packed)  # a payload that a worker would reject must not be sent
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EncodeError(f"payload {shown(value)} is not a {_name(payload_type)}: {error}") from error
        return packed

    def read(packed: bytes) -> Any:
        if checks_keys:
            refuse_array_keys(packed)
        try:
            return read_packed(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, RecursionError) as error:
            raise DecodeError(f"payload is not a {_name(payload_type)}: {error}") from error

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(value, payload_type, dec_hook=_from_plain)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DecodeError(f"value is not a {_name(payload_type)}: {error}") from error

    return write, read, convert


def _may_have_array_keys(payload_type: Any) -> bool:
    """Return True if msgspec may decode arrays or maps as keys of a map: see `refuse_array_keys`."""
    parts = _parts_of(msgspec.inspect.type_info(payload_type))
    keys = [part.key_type for part in parts if isinstance(part, msgspec.inspect.DictType)]
    return any(isinstance(part, _UNTYPED) for part in parts) or any(
        isinstance(part, _ARRAYS) for key in keys for part in _parts_of(key)
    )


def _parts_of(info: msgspec.inspect.Type) -> Iterable[Any]:
    """Return a type and the types of all its parts, each once."""
    parts: dict[int, Any] = {}
    todo: list[Any] = [info]
    while todo:
        part = todo.pop()
        if isinstance(part, list | tuple):
            todo += part
        elif isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field) and id(part) not in parts:
            parts[id(part)] = part
            todo += (getattr(part, name) for name in part.__struct_fields__)
    return parts.values()


def _to_plain(value: Any) -> Any:
    """Encode a value of a type that msgspec does not support."""
    if is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no MessagePack form")


def _from_plain(kind: Any, value: Any) -> Any:
    """Decode a value to a type that msgspec does not support."""
    if is_pydantic(kind):
        return kind.model_validate(value)
    return value  # msgspec checks its type


def _pydantic_codec(payload_type: Any) -> _Codec:
    def write(value: Any) -> bytes:
        try:
            return encode_value(payload_type.model_validate(value).model_dump(mode="json"))
        except ValueError as error:  # includes pydantic's ValidationError
            raise EncodeError(f"payload {shown(value)} is not a {_name(payload_type)}: {error}") from error

    def convert(value: Any) -> Any:
        try:
            return payload_type.model_validate(value)
        except (ValueError, TypeError, RecursionError) as error:  # validators may raise a TypeError
            raise DecodeError(f"payload is not a {_name(payload_type)}: {error}") from error

    def read(packed: bytes) -> Any:
        return convert(decode_value(packed))

    return write, read, convert
