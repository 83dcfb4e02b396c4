"""Limits how many keys a map may have, before Python hashes them.

Python hashes text and bytes with a secret, but numbers and times in a known way: an attacker can choose integers that
all follow the same path through a dict's table. A map of n of them takes about n² ns to build: 900 KB took 5 s.
Text takes 0.4 us per key in a large map, because its table does not fit into the CPU's cache: 1 MiB took 0.1 s.
"""

from __future__ import annotations

import re
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tampu.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
#: Types whose hashes cannot be predicted.
TEXT_TYPES = frozenset((str, bytes))

_key = itemgetter(0)
#: The header of a map of more than `UNCOUNTED_KEYS` keys, with a size of two bytes.
_COUNTED_MAP = re.compile(b"\xde(?:[\x01-\xff]|\x00[%c-\xff])" % (UNCOUNTED_KEYS + 1), re.DOTALL)


def may_have_large_maps(data: bytes) -> bool:
    """Return False if a payload has no map of more than 64 pairs: none of its bytes starts one."""
    return len(data) > SAFE_BYTES and (b"\xdf" in data or _COUNTED_MAP.search(data) is not None)


class MapBuilder:
    """Builds the maps of one payload. Raises `DecodeError` when their keys would take too long to hash.

    With `most`, it also counts lists and maps, and raises when there are more.
    """

    def __init__(self, size: int, most: int | None = None) -> None:
        self._size = size
        self._most = most
        self._containers_left = most or 0
        self._left = max(MAX_WORK, size * WORK_PER_BYTE)
        #: Maximum size of a map. msgpack refuses a larger one when it reads its header, before it builds the pairs.
        self.most_keys = self._keys_left = max(MAX_LARGE_KEYS, size // KEY_BYTES)

    def count(self, container: Any) -> Any:
        """Count a list, for the `list_hook` of msgpack, or a map."""
        self._containers_left -= 1
        if self._containers_left < 0:
            raise DecodeError(f"payload of {self._size:,} bytes has more than {self._most:,} lists and dicts")
        return container

    def build(self, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return a map from its pairs, for the `object_pairs_hook` of msgpack."""
        if self._most is not None:
            self.count(pairs)
        count = len(pairs)
        if count <= UNCOUNTED_KEYS:
            return dict(pairs)
        if count > MAX_NUMBER_KEYS:
            self._keys_left -= count
            if self._keys_left < 0:
                raise too_many_keys(self.most_keys)
        if not TEXT_TYPES.issuperset(map(type, map(_key, pairs))):
            self._left -= count * count
            if self._left < 0 or count > MAX_NUMBER_KEYS:
                if not _are_consecutive([*map(_key, pairs)]):
                    raise DecodeError(
                        f"payload has a map with {count:,} keys that are not all text; at most {MAX_NUMBER_KEYS:,} are "
                        "allowed, and fewer if there are several such maps: use text as keys, or a list of pairs"
                    )
                self._left += count * count
        return dict(pairs)


def too_many_keys(most: int) -> DecodeError:
    """Return the error for a payload with too many keys in large maps."""
    return DecodeError(
        f"payload has maps of more than {MAX_NUMBER_KEYS:,} keys with more than {most:,} keys in all; "
        f"at most {most:,} are allowed at this size: use lists of pairs, or several jobs"
    )


def _are_consecutive(keys: list[Any]) -> bool:
    """Return True for integers that follow one another: each has its own slot in a dict's table."""
    return type(keys[0]) is int and keys == [*range(keys[0], keys[0] + len(keys))]
