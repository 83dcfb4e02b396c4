"""Limits payloads whose type makes them slow to build: sets, Decimals, Flags and tagged unions.

`map_keys.py` counts the values of one payload; this module looks at a type once, and decides what has to be counted.
"""

from __future__ import annotations

from enum import Enum, IntFlag
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from tampu.errors import DecodeError
from tampu.wire.map_keys import SAFE_BYTES, SET_OF_NUMBERS, SET_OF_OBJECTS, SET_OF_TUPLES, may_have_slow_keys
from tampu.wire.payload import (
    LARGE_BYTES,
    MAX_NESTING,
    is_nested_too_deeply,
    refuse_array_keys,
    refuse_slow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Maximum number of values in a payload of up to 1 MiB, if its type has a Decimal (0.15 us each) or a Flag with few
#: members (3 us each; with 60 members 13 us, so fewer are allowed).
MAX_DECIMALS = 65_536
MAX_FLAGS = 16_384
#: Maximum number of values in a payload of up to 1 MiB, if its type has a set: a million of them take 0.15 s.
MAX_SET_VALUES = 262_144
#: Maximum number of combinations that an IntFlag keeps: 0.5 KB each.
MAX_COMBINATIONS = 65_536
#: Maximum sum of the bytes below each level of a payload, for a type with tagged unions, and the number of levels
#: that are always allowed.
MAX_SKIPPED_BYTES = 16 << 20
MIN_TAGGED_LEVELS = 16
#: Types that text or bytes become, and whose hashes are known.
_FROM_TEXT = (msgspec.inspect.UUIDType, msgspec.inspect.DecimalType)
#: `_missing_` of an Enum that does not define it.
_NO_MISSING = getattr_static(Enum, "_missing_")


class TypeLimits:
    """The limits that payloads of one type need."""

    def __init__(self, payload_type: Any) -> None:
        parts = _parts_of(msgspec.inspect.type_info(payload_type))
        self._has_sequence_keys = any(map(_may_have_sequence_keys, parts))
        self._has_number_keys = self._has_sequence_keys or any(map(_may_have_number_keys, parts))
        self._hashes_text = any(map(_hashes_text, parts))
        self._set_work = max(map(_set_work, parts), default=0)
        self._max_values = _max_values(parts, has_sets=self._set_work > 0)
        has_slow_values = bool(self._set_work or self._max_values or self._hashes_text)
        self._unchecked_bytes = SAFE_BYTES if has_slow_values else LARGE_BYTES
        self._has_tagged_union = any(map(_is_tagged_union, parts))
        self._int_flags = [part.cls for part in parts if _is_int_flag(part)]
        #: True if building values of this type takes much longer than decoding them without a type.
        self.is_slow = has_slow_values or self._has_tagged_union

    def check(self, packed: bytes) -> None:
        """Raise `DecodeError` if a payload would take too long to decode to this type."""
        if self._has_tagged_union and len(packed) > LARGE_BYTES:
            # The tag may come last: then all levels below it are skipped, and read again, on every level.
            most = min(MAX_NESTING, max(MIN_TAGGED_LEVELS, MAX_SKIPPED_BYTES // len(packed)))
            if is_nested_too_deeply(packed, most):
                raise DecodeError(
                    f"payload of {len(packed):,} bytes has more than {most} levels, the maximum at this size for a "
                    "type with tagged unions"
                )
        checks_keys = self._has_sequence_keys or (self._has_number_keys and may_have_slow_keys(packed))
        if len(packed) > self._unchecked_bytes:
            refuse_slow(
                packed, self._max_values, self._set_work, hashes_text=self._hashes_text, checks_keys=checks_keys
            )
        elif checks_keys:
            refuse_array_keys(packed)

    def bounded(self, read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Return `read`, which for a type with an IntFlag forgets numbers that payloads have added to it.

        An IntFlag keeps every number that it has seen: without this, payloads could fill the memory. It compares by
        number, so a member that was forgotten equals one that is made later. Flags of other kinds compare by identity.
        """
        if not self._int_flags:
            return read

        def read_bounded(packed: bytes) -> Any:
            try:
                return read(packed)
            finally:  # also if the payload is refused at its end
                for flag in self._int_flags:
                    if len(flag._value2member_map_) > MAX_COMBINATIONS:
                        _forget_combinations(flag)

        return read_bounded


def _forget_combinations(flag: type[Enum]) -> None:
    members = {member.value for member in flag.__members__.values()}
    for number in flag._value2member_map_.keys() - members:
        flag._value2member_map_.pop(number, None)


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


def _is_int_flag(part: msgspec.inspect.Type) -> TypeGuard[msgspec.inspect.EnumType]:
    return isinstance(part, msgspec.inspect.EnumType) and issubclass(part.cls, IntFlag)


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
