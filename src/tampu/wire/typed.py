"""Typed payloads: how values of one type are written, and checked when they are read.

Dataclasses, msgspec Structs, TypedDicts and whatever else msgspec knows; pydantic models when pydantic is installed,
also inside the others.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.base.checks import shown
from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.payload import decode_value, encode_value, slot_format
from tampu.wire.scan import bin_content

if TYPE_CHECKING:
    from collections.abc import Callable


class TypedPayload:
    """Writes and reads payloads of `payload_type`."""

    __slots__ = ("_read", "_write", "payload_type")

    def __init__(self, payload_type: Any) -> None:
        self.payload_type = payload_type
        if is_pydantic(payload_type):
            self._write, self._read = _pydantic_codec(payload_type)
        else:
            self._write, self._read = _msgspec_codec(payload_type)

    def encode(self, value: Any) -> bytes:
        """The value as MessagePack; `EncodeError` when it is not of the type."""
        return self._write(value)

    def decode_slot(self, slot: bytes) -> Any:
        """The value in a payload slot of either format; `DecodeError` when it does not fit the type."""
        content = bin_content(slot)
        return self._read(slot if content is None else content)


def inline_only(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`encode` for format 'inline', where bytes are refused: every reader would take them for a payload in a bin."""

    def write(value: Any) -> bytes:
        packed = encode(value)
        if slot_format(packed) == "bin":
            raise EncodeError(f"payload {shown(value)} cannot be written inline: bytes need payload_format 'bin'")
        return packed

    return write


def _name(payload_type: Any) -> str:
    return getattr(payload_type, "__name__", str(payload_type))


def is_pydantic(payload_type: Any) -> bool:
    """Whether it is a model of pydantic's."""
    pydantic = sys.modules.get("pydantic")  # its models cannot exist before it was imported
    return pydantic is not None and isinstance(payload_type, type) and issubclass(payload_type, pydantic.BaseModel)


def _msgspec_codec(payload_type: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    try:
        read_packed = msgspec.msgpack.Decoder(payload_type, dec_hook=_from_plain).decode
    except TypeError as error:
        raise ConfigError(f"payload_type {_name(payload_type)} cannot be written as MessagePack: {error}") from error
    pack = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode

    def write(value: Any) -> bytes:
        try:
            packed = pack(value)
            # Reading it back is the check: what a worker would refuse must not be sent.
            read_packed(packed)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EncodeError(f"payload {shown(value)} is not a {_name(payload_type)}: {error}") from error
        return packed

    def read(packed: bytes) -> Any:
        try:
            return read_packed(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, RecursionError) as error:
            raise DecodeError(f"payload is not a {_name(payload_type)}: {error}") from error

    return write, read


def convert(value: Any, payload_type: Any) -> Any:
    """A value that was decoded without a type, brought into the type; `DecodeError` when it does not fit."""
    try:
        return msgspec.convert(value, payload_type, dec_hook=_from_plain)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise DecodeError(f"value is not a {_name(payload_type)}: {error}") from error


def _to_plain(value: Any) -> Any:
    """How msgspec writes what it does not know."""
    if is_pydantic(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no MessagePack form")


def _from_plain(wanted: Any, value: Any) -> Any:
    """How msgspec reads what it does not know."""
    if is_pydantic(wanted):
        return wanted.model_validate(value)
    return value  # msgspec looks whether it is one


def _pydantic_codec(payload_type: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    def write(value: Any) -> bytes:
        try:
            return encode_value(payload_type.model_validate(value).model_dump(mode="json"))
        except ValueError as error:  # pydantic's ValidationError is one
            raise EncodeError(f"payload {shown(value)} is not a {_name(payload_type)}: {error}") from error

    def read(packed: bytes) -> Any:
        value = decode_value(packed)
        try:
            return payload_type.model_validate(value)
        except ValueError as error:
            raise DecodeError(f"payload is not a {_name(payload_type)}: {error}") from error

    return write, read
