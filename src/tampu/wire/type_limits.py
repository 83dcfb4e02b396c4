"""Limits payloads whose type makes them slow to build: sets, Decimals, Flags, tagged unions, fields left out.

`map_keys.py` counts the values of one payload; this module looks at a type once, and decides what has to be counted.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum, Flag
from inspect import getattr_static
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from tampu.errors import DecodeError
from tampu.wire.map_keys import SAFE_BYTES, SET_OF_NUMBERS, SET_OF_OBJECTS, SET_OF_TUPLES, may_have_slow_keys
from tampu.wire.payload import (
    LARGE_BYTES,
    MAX_NESTING,
    STARTS_NO_CONTAINER,
    STARTS_NO_DICT,
    is_nested_too_deeply,
    refuse_array_keys,
    refuse_slow,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Maximum number of values in a payload of up to 1 MiB, if its type has a Decimal (0.15 us each) or a Flag with few
#: members (3 us each; with 60 members 13 us, so fewer are allowed).
MAX_DECIMALS = 65_536
MAX_FLAGS = 16_384
#: Maximum number of values in a payload of up to 1 MiB, if its type has a set: a million of them take 0.15 s.
MAX_SET_VALUES = 262_144
#: Maximum number of lists, dicts and objects that are made for fields which a payload of up to 1 MiB leaves out: 0.3 us
#: each.
MAX_DEFAULTS = 65_536
#: Maximum number of combinations of a Flag's members that payloads may add to those it keeps: 0.5 KB each.
MAX_COMBINATIONS = 65_536
#: Maximum sum of the bytes below each level of a payload, for a type with tagged unions, and the number of levels
#: that are always allowed.
MAX_SKIPPED_BYTES = 16 << 20
MIN_TAGGED_LEVELS = 16
#: Types that text or bytes become, and whose hashes are known.
_FROM_TEXT = (msgspec.inspect.UUIDType, msgspec.inspect.DecimalType)
#: `_missing_` of an Enum that does not define it.
_NO_MISSING = getattr_static(Enum, "_missing_")

_key = itemgetter(0)


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
        self._defaults = DefaultFields.of(parts)
        self._has_tagged_union = any(map(_is_tagged_union, parts))
        self._flags = [part.cls for part in parts if _is_flag(part)]
        #: True if building values of this type takes much longer than decoding them without a type.
        self.is_slow = has_slow_values or self._defaults is not None or self._has_tagged_union

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
        if self._defaults is not None:
            self._defaults.check(packed)

    def bounded(self, read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Return `read`, which for a type with Flags refuses payloads that would fill the memory.

        A Flag keeps every combination of its members that it has seen, and an IntFlag every number.
        """
        if not self._flags:
            return read

        def read_bounded(packed: bytes) -> Any:
            sizes = [len(flag._value2member_map_) for flag in self._flags]
            try:
                value = read(packed)
            finally:  # also if it is refused at its end
                too_many = [flag for flag, size in zip(self._flags, sizes, strict=True) if _forget(flag, size)]
            if too_many:
                raise DecodeError(
                    f"payload has new combinations of {too_many[0].__name__}, of which this process has already seen "
                    f"{MAX_COMBINATIONS:,}: use int instead of the Flag"
                )
            return value

        return read_bounded


def _forget(flag: type[Enum], size: int) -> bool:
    """Remove the combinations that were added to the first `size` ones, if there are too many."""
    known = flag._value2member_map_
    if len(known) <= max(size, MAX_COMBINATIONS):
        return False
    for combination in [*known][size:]:
        known.pop(combination, None)
    return True


class DefaultFields:
    """Limits what structs and dataclasses make for the fields that a payload leaves out, such as empty lists.

    65,000 empty maps that became structs with 20 default lists took 0.4 s.
    """

    def __init__(self, objects: Iterable[msgspec.inspect.StructType | msgspec.inspect.DataclassType]) -> None:
        #: Of each type that is written as a map: the names of required fields, and the values made by name of field.
        self._maps: list[tuple[frozenset[str], dict[str, int]]] = []
        #: Of each type that is written as a list: the number of required values, and the values made by length of list.
        self._lists: list[tuple[int, list[int]]] = []
        self._most = 0
        for kind in objects:
            made = [_values_made(field.default_factory) for field in kind.fields]
            self._most = max(self._most, sum(made))
            if isinstance(kind, msgspec.inspect.StructType) and kind.array_like:
                tag = 0 if kind.tag is None else 1
                required = sum(field.required for field in kind.fields)
                self._lists.append((tag + required, [sum(made)] * tag + [sum(made[at:]) for at in range(len(made))]))
            else:
                required_names = frozenset(field.encode_name for field in kind.fields if field.required)
                names = (field.encode_name for field in kind.fields)
                self._maps.append((required_names, dict(zip(names, made, strict=True))))
        self._names: frozenset[str] = frozenset().union(*(made for _, made in self._maps))
        self._others = STARTS_NO_CONTAINER if self._lists else STARTS_NO_DICT

    @classmethod
    def of(cls, parts: Iterable[msgspec.inspect.Type]) -> DefaultFields | None:
        """Return the default fields of a type; None if it has none that are made for each object."""
        objects = (msgspec.inspect.StructType, msgspec.inspect.DataclassType)
        found = cls(part for part in parts if isinstance(part, objects))
        return found if found._most else None

    def check(self, packed: bytes) -> None:
        """Raise `DecodeError` if a payload leaves out too many fields."""
        most = max(MAX_DEFAULTS, len(packed) * MAX_DEFAULTS >> 20)
        fewest = most // self._most
        if len(packed) <= fewest or len(packed.translate(None, self._others)) <= fewest:
            return  # too few bytes that could start an object
        left = most
        #: By the fields of an object: nearly all objects of a type have the same.
        made_by_names: dict[frozenset[str], int] = {}

        def count(made: int) -> None:
            nonlocal left
            left -= made
            if left < 0:
                raise DecodeError(
                    f"payload of {len(packed):,} bytes leaves out more than {most:,} fields that default to a list, a "
                    "dict or an object, the maximum at this size: use several jobs"
                )

        def count_map(pairs: list[tuple[Any, Any]]) -> None:
            # Only known names are kept: other keys could be chosen so that hashing them takes long.
            names = self._names.intersection(map(_key, pairs))
            made = made_by_names.get(names)
            if made is None:
                made = made_by_names[names] = self._of_map(names)
            count(made)

        def count_list(values: list[Any]) -> None:
            count(self._of_list(len(values)))

        walk(packed, count_map, count_list if self._lists else None)

    def _of_map(self, names: frozenset[str]) -> int:
        """Return how many values an object makes that is written as a map with these fields."""
        most = 0
        for required, made in self._maps:
            if required <= names:
                most = max(most, sum(map(made.__getitem__, made.keys() - names)))
        return most

    def _of_list(self, size: int) -> int:
        """Return how many values an object makes that is written as a list of this size."""
        return max((made[size] for required, made in self._lists if required <= size < len(made)), default=0)


def _values_made(factory: Any, outer: tuple[Any, ...] = ()) -> int:
    """Return how many values a default factory makes: a struct or dataclass also makes those of its own fields."""
    if factory is msgspec.NODEFAULT:
        return 0
    if factory in outer or not isinstance(factory, type):
        return 1
    if not issubclass(factory, msgspec.Struct) and not is_dataclass(factory):
        return 1
    info = msgspec.inspect.type_info(factory)
    fields = getattr(info, "fields", ())
    return 1 + sum(_values_made(field.default_factory, (*outer, factory)) for field in fields)


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


def _is_flag(part: msgspec.inspect.Type) -> TypeGuard[msgspec.inspect.EnumType]:
    return isinstance(part, msgspec.inspect.EnumType) and issubclass(part.cls, Flag)


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
