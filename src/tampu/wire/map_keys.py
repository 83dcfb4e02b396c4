"""Limits how many values a payload may have where they are slow to build: keys of maps, members of sets, and others.

Python hashes text and bytes with a secret, but numbers and times in a known way: an attacker can choose integers that
all follow the same path through a dict's table. A map of n of them takes about n² ns to build: 900 KB took 5 s. A set
compares neighbours in its table first, which takes half as long.
Text takes 0.4 us per key in a large map, because its table does not fit into the CPU's cache: 1 MiB took 0.1 s.
A timestamp takes 0.5 us as a key: 150,000 took 75 ms.
"""

from __future__ import annotations

import re
from datetime import datetime
from math import isqrt
from operator import countOf, itemgetter
from typing import TYPE_CHECKING, Any

from tampu.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Maximum size of a map whose keys are not all text or bytes, unless they are consecutive integers.
MAX_NUMBER_KEYS = 2048
#: Maximum sum of the squares of the sizes of these maps, in a payload of up to 1 MiB. Larger payloads may have more.
MAX_WORK = MAX_NUMBER_KEYS**2
WORK_PER_BYTE = MAX_WORK >> 20
#: A payload of up to this size, in bytes, cannot exceed the limit: each pair takes two bytes.
SAFE_BYTES = 2 * MAX_NUMBER_KEYS
#: Maps of up to this size are not counted: their tables are too small to be slow.
UNCOUNTED_KEYS = 64
#: Maximum number of keys in maps of more than `MAX_NUMBER_KEYS` keys, together, in a payload of up to 1 MiB. Larger
#: payloads may have more, at `KEY_BYTES` each.
MAX_LARGE_KEYS = 50_000
KEY_BYTES = 24
#: Maximum number of timestamps that are keys of maps, in a payload of up to 1 MiB. Larger payloads may have more, at
#: `TIME_KEY_BYTES` each.
MAX_TIME_KEYS = 32_768
TIME_KEY_BYTES = 32
#: Work of comparing the members of a set, all with each other. Numbers take 0.5 ns, at the least. Tuples are easy to
#: make collide, as Python hashes -1 and -2 alike, and take 15 to 50 ns for each value in them; dataclasses and structs
#: take 700 ns.
SET_OF_NUMBERS = 1 / 16
SET_OF_TUPLES = 2.0
SET_OF_OBJECTS = 32.0
#: Work of UUIDs and Decimals, as keys or as members, relative to the square of their number: 60 ns each.
UUID_KEYS = 4
#: Sets of up to this size are not counted.
UNCOUNTED_MEMBERS = 8
#: Types whose hashes cannot be predicted.
TEXT_TYPES = frozenset((str, bytes))

_key = itemgetter(0)
_CONTAINERS = frozenset((list, dict))
_INTEGERS = frozenset((int,))
#: Sizes of a UUID as bytes, and as text without and with hyphens; characters that a Decimal may start with.
_UUID_SIZES = (16, 32, 36)
_DECIMAL_STARTS = frozenset("+-.0123456789")
#: The header of a map of more than `UNCOUNTED_KEYS` keys, with a size of two bytes.
_COUNTED_MAP = re.compile(b"\xde(?:[\x01-\xff]|\x00[%c-\xff])" % (UNCOUNTED_KEYS + 1), re.DOTALL)
#: What the three forms of a timestamp start with.
_TIME_LEADS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")


def may_have_slow_keys(data: bytes) -> bool:
    """Return False if a payload has no map of more than 64 pairs, and few timestamps: no bytes start one."""
    return len(data) > SAFE_BYTES and (
        b"\xdf" in data or _COUNTED_MAP.search(data) is not None or _may_have_many_times(data)
    )


def _may_have_many_times(data: bytes) -> bool:
    return len(data) > 6 * MAX_TIME_KEYS and sum(map(data.count, _TIME_LEADS)) > MAX_TIME_KEYS


class LimitedBuilder:
    """Builds the maps of one payload, and looks at its lists. Raises `DecodeError` when it would take too long.

    `most_containers` limits lists and maps, `most_values` their values, and `set_work` lists that may become sets (the
    largest of `SET_OF_NUMBERS`, `SET_OF_TUPLES` and `SET_OF_OBJECTS` in the type). None or 0: no limit. With
    `hashes_text`, text may become keys or members of another type, such as UUID, whose hashes are known.
    """

    def __init__(
        self,
        data: bytes,
        most_containers: int | None = None,
        most_values: int | None = None,
        set_work: float = 0,
        *,
        hashes_text: bool = False,
    ) -> None:
        size = len(data)
        self._size = size
        self._most_containers = most_containers
        self._containers_left = size if most_containers is None else most_containers
        self._most_values = most_values
        self._values_left = size if most_values is None else most_values
        self._set_work = set_work
        self._hashes_text = hashes_text
        self._key_work = UUID_KEYS if hashes_text else 1
        self._member_work = UUID_KEYS if hashes_text else SET_OF_NUMBERS
        self._uncounted_keys = UNCOUNTED_MEMBERS if hashes_text else UNCOUNTED_KEYS
        #: For sets of tuples: the number of values in each list and map, by its identity, until its parent is built.
        self._sizes: dict[int, int] = {}
        self._left = max(MAX_WORK, size * WORK_PER_BYTE)
        self._times_left = max(MAX_TIME_KEYS, size // TIME_KEY_BYTES) if _may_have_many_times(data) else None
        #: True if lists need a look too.
        self.looks_at_lists = most_containers is not None or most_values is not None or set_work > 0
        #: Maximum size of a map. msgpack refuses a larger one when it reads its header, before it builds the pairs.
        self.most_keys = self._keys_left = max(MAX_LARGE_KEYS, size // KEY_BYTES)

    def look_at_list(self, values: list[Any]) -> list[Any]:
        """Count a list and its values, for the `list_hook` of msgpack."""
        self._count(values)
        if self._set_work:
            count = len(values)
            size = count
            work = self._member_work
            if not _CONTAINERS.isdisjoint(map(type, values)):
                # It cannot become a set of numbers, nor one of tuples if a map comes first.
                may_be_set = self._set_work == SET_OF_OBJECTS or type(values[0]) is not dict
                work = self._set_work if self._set_work > SET_OF_NUMBERS and may_be_set else 0
                size = self._size_of(values) if self._set_work > SET_OF_NUMBERS else 0
            if self._set_work > SET_OF_NUMBERS:
                self._sizes[id(values)] = size
            if count > UNCOUNTED_MEMBERS and self._is_too_much_work(values, int(count * size * work)):
                raise DecodeError(
                    f"payload has a list of {count:,} values that are not text, too many for a type with a set: use "
                    "list instead of set"
                )
        return values

    def _size_of(self, values: Iterable[Any]) -> int:
        """Return the number of values in a list or map, and in the lists and maps in it."""
        size = 0
        for value in values:
            size += 1 + (self._sizes.pop(id(value), 0) if type(value) in _CONTAINERS else 0)
        return size

    def build(self, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return a map from its pairs, for the `object_pairs_hook` of msgpack."""
        if self.looks_at_lists:
            self._count(pairs)
        if self._times_left is not None:
            self._times_left -= countOf(map(type, map(_key, pairs)), datetime)
            if self._times_left < 0:
                raise DecodeError(
                    f"payload of {self._size:,} bytes has more than {MAX_TIME_KEYS:,} timestamps per MiB as keys of "
                    "maps: use text as keys, or a list of pairs"
                )
        if len(pairs) > self._uncounted_keys:
            self._check_keys(pairs)
        built = dict(pairs)
        if self._set_work > SET_OF_NUMBERS:
            self._sizes[id(built)] = self._size_of(built.values())
        return built

    def _check_keys(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        count = len(pairs)
        if count > MAX_NUMBER_KEYS:
            self._keys_left -= count
            if self._keys_left < 0:
                raise too_many_keys(self.most_keys)
        if self._is_too_much_work([*map(_key, pairs)], count * count * self._key_work):
            most = isqrt(MAX_WORK // self._key_work)
            raise DecodeError(
                f"payload has a map with {count:,} keys that are not all text (UUIDs and Decimals are not); at most "
                f"{most:,} are allowed, and fewer if there are several such maps: use text as keys, or a list of pairs"
            )

    def _count(self, container: Sequence[Any]) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise DecodeError(
                f"payload of {self._size:,} bytes has more than {self._most_containers:,} lists and dicts"
            )
        self._values_left -= len(container)
        if self._values_left < 0:
            raise DecodeError(
                f"payload of {self._size:,} bytes has more than {self._most_values:,} values, the maximum for a type "
                "with a set, a Decimal or a Flag: use another type, or several jobs"
            )

    def _is_too_much_work(self, keys: list[Any], work: int) -> bool:
        """Return True if these keys, with all before them, may take too long to hash."""
        if TEXT_TYPES.issuperset(map(type, keys)):
            if not self._hashes_text or not any(map(_may_be_uuid_or_decimal, keys)):
                return False
        elif _are_dense(keys):
            return False
        self._left -= work
        return self._left < 0


def too_many_keys(most: int) -> DecodeError:
    """Return the error for a payload with too many keys in large maps."""
    return DecodeError(
        f"payload has maps of more than {MAX_NUMBER_KEYS:,} keys with more than {most:,} keys in all; "
        f"at most {most:,} are allowed at this size: use lists of pairs, or several jobs"
    )


def _may_be_uuid_or_decimal(key: str | bytes) -> bool:
    return len(key) in _UUID_SIZES or (isinstance(key, str) and key[:1] in _DECIMAL_STARTS)


def _are_dense(keys: list[Any]) -> bool:
    """Return True for integers that follow one another, in any order: each has its own slot in a dict's table."""
    return _INTEGERS.issuperset(map(type, keys)) and max(keys) - min(keys) < len(keys)
