"""Payloads made to be slow: each decodes or is refused in a time that is linear in its size."""

from __future__ import annotations

import contextlib
import enum
import functools
import struct
import time
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from math import isqrt
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import msgspec
import pytest

from tampu.errors import DecodeError, EncodeError
from tampu.wire import decode_job, decode_result, decode_spec, type_limits
from tampu.wire.map_keys import (
    MAX_LARGE_KEYS,
    MAX_NUMBER_KEYS,
    MAX_TIME_KEYS,
    MAX_WORK,
    SET_OF_NUMBERS,
    SET_OF_TUPLES,
    UNCOUNTED_KEYS,
    UNCOUNTED_MEMBERS,
    UUID_KEYS,
    LimitedBuilder,
)
from tampu.wire.payload import (
    MAX_CONTAINERS,
    MAX_NESTING,
    decode_slot,
    decode_value,
    encode_value,
    encode_values,
    wrap_bin,
)
from tampu.wire.retry import (
    BackoffKind,
    BackoffSpec,
    JobRetryOverride,
    WireBackoff,
    WireRetry,
    _known_retry,
    from_wire_retry,
)
from tampu.wire.scan import MAX_FIELDS
from tampu.wire.task_codec import Arguments, Results
from tampu.wire.type_limits import MAX_DECIMALS, MAX_FLAGS
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIZE = 1 << 20
#: Ten times what the slowest takes; a quadratic decoder needs seconds.
LIMIT_SECS = 0.5
ARRAY_KEY = b"\x81\x91\x01\x02"
MAP_KEY = b"\x81\x80\x02"
#: A map for which the keys of all maps are counted.
LARGER_MAP = b"\xde\x00\x41" + b"".join(b"\xa2%02d\x01" % number for number in range(65))


def map_of(keys: Iterable[bytes]) -> bytes:
    """Return a map of about a MiB with these keys."""
    pairs, size = [], 0
    for key in keys:
        pairs.append(key + b"\xc0")
        size += len(key) + 1
        if size > SIZE - 64:
            break
    return b"\xdf" + len(pairs).to_bytes(4, "big") + b"".join(pairs)


def array_of(items: bytes, first: bytes = b"\xc0", values: int = 1) -> bytes:
    """Return an array of about a MiB: `first`, then `items`, which are this number of values, again and again."""
    count = (SIZE - 5 - len(first)) // len(items)
    return b"\xdd" + (1 + count * values).to_bytes(4, "big") + first + items * count


def colliding(count: int, log2: int) -> list[int]:
    """Return integers that follow one path through a dict's table of 2**log2 slots: each is compared to all before it.

    Half of them occupy the slots i, 5i + 1, ... in turn; the others enter that path near its beginning.
    """
    mask = (1 << log2) - 1
    path = [0]
    while len(path) < count:
        path.append(5 * path[-1] + 1 & mask)
    order = {slot: number for number, slot in enumerate(path)}
    keys = path[: count // 2 + 1]
    candidate = 0
    while len(keys) < count:
        candidate += 1 << log2
        slot, perturb = candidate & mask, candidate
        while perturb and order.get(slot, count) < len(keys):
            perturb >>= 5
            slot = 5 * slot + perturb + 1 & mask
        if order.get(slot, count) < len(keys) // 2:
            keys.append(candidate)
    return keys


def integer_map(keys: Iterable[int]) -> bytes:
    """Return a map with these keys, however many there are."""
    pairs = [b"\xcf" + struct.pack(">Q", key) + b"\xc0" for key in keys]
    return b"\xdf" + len(pairs).to_bytes(4, "big") + b"".join(pairs)


#: Made when they are needed: the first takes ten seconds.
HOSTILE: dict[str, Callable[[], bytes]] = {
    "integers on one path": lambda: integer_map(colliding(43_000, 16)),
    "several maps of integers on one path": lambda: array_of(integer_map(colliding(MAX_NUMBER_KEYS, 12))),
    # hash(-1) == hash(-2): arrays of them all collide.
    "array keys": lambda: map_of(
        b"\xdc\x00\x12" + bytes(0xFF if bit == "0" else 0xFE for bit in f"{number:018b}") for number in range(1 << 18)
    ),
    "integers with equal low bits": lambda: map_of(
        b"\xcf" + struct.pack(">Q", number << 40) for number in range(1 << 17)
    ),
    "floats of equal hash": lambda: map_of(
        b"\xcb" + struct.pack(">d", number * 2.0 ** (61 * power))
        for number in range(1, 5000)
        for power in range(-16, 16)
    ),
    # msgpack's own timestamps hash to seconds + nanoseconds.
    "timestamps": lambda: map_of(b"\xd7\xff" + struct.pack(">Q", (10**9 - n << 34) | n) for n in range(1 << 17)),
    "maps of a timestamp": lambda: array_of(b"\x81\xd6\xff\x00\x01\x02\x03\xc0"),
    "maps of a timestamp, and one of 65 keys": lambda: array_of(b"\x81\xd6\xff\x00\x01\x02\x03\xc0", LARGER_MAP),
    "maps, and one of 65 keys": lambda: array_of(b"\x86" + b"\x01\xc0" * 6 + bytes(4), LARGER_MAP, values=5),
    "text keys": lambda: map_of(b"\xa5" + b"%05x" % number for number in range(1 << 18)),
    "maps of 16 text keys": lambda: array_of(
        b"\xde\x00\x10" + b"".join(b"\xa2%02d\x01" % number for number in range(16))
    ),
    "extensions": lambda: array_of(b"\xd4\x05\x00"),
    "integers": lambda: array_of(b"\x01"),
    "empty arrays": lambda: array_of(b"\x90"),
    "small maps": lambda: array_of(b"\x81\x01\x01"),
    "deep arrays": lambda: b"\x91" * SIZE + b"\x01",
    "a claim": lambda: b"\xdd\xff\xff\xff\xff" + b"\x01" * SIZE,
    "an invalid end": lambda: array_of(b"\x01")[:-1] + b"\xc1",
}


@functools.cache
def hostile(kind: str) -> bytes:
    return HOSTILE[kind]()


READERS: dict[str, Callable[[bytes], Any]] = {
    "payload": decode_value,
    "slot": lambda data: decode_slot(wrap_bin(data)),
    "envelope": lambda data: decode_job(b"\x94\xa1a" + data + b"\x05\x00").payload,
    "envelope as a map": lambda data: (
        decode_job(b"\x84\xa2id\xa1a\xa7payload" + data + b"\xadcreated_at_ms\x05\xa7attempt\x00").payload
    ),
    "spec": lambda data: decode_spec(b"\x98\xa1k\xa1n\x81\xa5Every" + data + b"\xc4\x01\x01\xc0\xc0\xc0\xa4Skip"),
    "untyped argument": lambda data: Arguments(lambda value: None, "t").decode(b"\x81\xa5value" + data),
}


@pytest.mark.slow
@pytest.mark.xdist_group("hostile_payloads")  # in one process, so that they are made once
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_payload_takes_linear_time(kind: str, reader: str) -> None:
    packed = hostile(kind)
    begin = time.process_time()
    with contextlib.suppress(DecodeError):
        READERS[reader](packed)
    assert time.process_time() - begin < LIMIT_SECS


@pytest.mark.parametrize("packed", [ARRAY_KEY, MAP_KEY, b"\x91" + ARRAY_KEY, b"\x81\xa1a" + ARRAY_KEY])
def test_arrays_and_maps_as_keys_are_refused(packed: bytes) -> None:
    for read in (decode_value, decode_result, decode_slot, lambda data: decode_slot(wrap_bin(data))):
        with pytest.raises(DecodeError, match="as the key of a map"):
            read(packed)


@pytest.mark.parametrize("value", [{(1, 2): 3}, [{(): 1}], {"a": {"b": {(1,): 1}}}])
def test_tuples_as_keys_are_not_written(value: Any) -> None:
    with pytest.raises(EncodeError, match="as the key of a map"):
        encode_value(value)


@pytest.mark.parametrize("kind", [dict[tuple[int, int], str], dict[str, Any], Any, list[dict[Any, Any]]])
def test_a_type_does_not_allow_array_keys(kind: Any) -> None:
    codec = TypedPayload(kind)
    with pytest.raises(DecodeError, match="as the key of a map"):
        codec.decode_slot(b"\x81\x92\x01\x02\xa1a")
    with pytest.raises(EncodeError):
        codec.encode({(1, 2): "a"})


def test_keys_that_are_plain_values_keep_their_types() -> None:
    value = {1: "a", "b": 2, b"c": 3, 1.5: 4, None: 5, False: 6}
    assert decode_value(encode_value(value)) == value


def test_the_number_of_keys_in_large_maps_is_limited() -> None:
    half = {f"{number:x}": 0 for number in range(MAX_LARGE_KEYS // 2)}
    assert decode_value(encode_value([half, half])) == [half, half]
    too_many = {f"{number:x}": 0 for number in range(MAX_LARGE_KEYS + 1)}
    packed = map_of(b"\xa5" + b"%05x" % number for number in range(MAX_LARGE_KEYS + 1))
    for refuse, error in (
        (lambda: encode_value(too_many), EncodeError),
        (lambda: encode_value([half, half, half]), EncodeError),
        (lambda: encode_values([{}, too_many]), EncodeError),
        (lambda: decode_value(packed), DecodeError),
        (lambda: decode_slot(wrap_bin(packed)), DecodeError),
    ):
        with pytest.raises(error, match="more than 50,000 keys in all; at most 50,000 are allowed"):
            refuse()


def test_a_map_that_is_too_large_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: LimitedBuilder, pairs: Any) -> dict[Any, Any]:
        raise AssertionError("its pairs were built, which takes most of the time")

    monkeypatch.setattr(LimitedBuilder, "build", build)
    with pytest.raises(DecodeError, match="more than 50,000 keys in all"):
        decode_value(map_of(b"\xa5" + b"%05x" % number for number in range(MAX_LARGE_KEYS + 1)))


def spread(count: int) -> dict[int, None]:
    return dict.fromkeys(range(0, 1000 * count, 1000))


def test_the_number_of_keys_that_are_not_text_is_limited() -> None:
    most = spread(MAX_NUMBER_KEYS)
    assert decode_value(encode_value(most)) == most
    too_many = spread(MAX_NUMBER_KEYS + 1)
    packed = integer_map(too_many)
    for refuse, error in (
        (lambda: encode_value(too_many), EncodeError),
        (lambda: encode_value([too_many]), EncodeError),
        (lambda: encode_values([{}, too_many]), EncodeError),
        (lambda: TypedPayload(dict[int, None]).encode(too_many), EncodeError),
        (lambda: decode_value(packed), DecodeError),
        (lambda: decode_slot(wrap_bin(packed)), DecodeError),
        (lambda: TypedPayload(dict[int, None]).decode_slot(packed), DecodeError),
        (lambda: TypedPayload(dict[float | str, None]).decode_slot(packed), DecodeError),
    ):
        with pytest.raises(error, match=r"a map with 2,049 keys that are not all text .*; at most 2,048 are allowed"):
            refuse()


def test_a_large_map_in_a_bulk_of_short_payloads_is_found() -> None:
    # Its bytes start no list or dict, except the first.
    numbers = dict.fromkeys((high << 8 | low for high in range(1, 17) for low in range(0x80)), 0)
    numbers |= dict.fromkeys(range(-1, -4, -1), 0)
    with pytest.raises(EncodeError, match="a map with 2,051 keys"):
        encode_values([*[{}] * 1000, numbers])


def test_text_and_consecutive_integers_as_keys_are_limited_less() -> None:
    for value in ({str(n): n for n in range(50_000)}, {n.to_bytes(3): n for n in range(50_000)}):
        assert decode_value(encode_value(value)) == value
        assert [decode_value(one) for one in encode_values([value])] == [value]
    lines = dict.fromkeys(range(7, 50_000))
    assert decode_value(encode_value(lines)) == lines
    assert TypedPayload(dict[int, None]).decode_slot(encode_value(lines)) == lines


def test_the_keys_of_all_maps_of_a_payload_are_limited_together() -> None:
    one = spread(256)
    most = MAX_WORK // 256**2
    assert decode_value(encode_value([one] * most)) == [one] * most
    with pytest.raises(EncodeError, match="fewer if there are several such maps"):
        encode_value([one] * (most + 1))
    small = [spread(UNCOUNTED_KEYS)] * 5000
    assert decode_value(encode_value(small)) == small


def test_the_number_of_containers_is_limited() -> None:
    most = [[]] * (MAX_CONTAINERS - 1)
    assert decode_value(encode_value(most)) == most
    with pytest.raises(EncodeError, match="more than 65,536 lists and dicts"):
        encode_value([*most, []])


@pytest.mark.parametrize("kind", [list[list[int]], list[frozenset[int]], list[dict[str, int]]])
def test_the_number_of_containers_is_limited_for_typed_payloads_too(kind: Any) -> None:
    codec = TypedPayload(kind)
    lead = b"\x80" if kind == list[dict[str, int]] else b"\x90"
    most = MAX_CONTAINERS - 1  # without the list around them
    assert len(codec.decode_slot(b"\xdd" + most.to_bytes(4, "big") + lead * most)) == most
    with pytest.raises(DecodeError, match="more than 65,536 lists and dicts"):
        codec.decode_slot(b"\xdd" + (most + 1).to_bytes(4, "big") + lead * (most + 1))
    with pytest.raises(EncodeError, match="more than 65,536 lists and dicts"):
        codec.encode([{} if lead == b"\x80" else []] * (most + 1))


@pytest.mark.parametrize("keys_per_map", [1, 15, 64])
@pytest.mark.parametrize("first", [b"\xc0", LARGER_MAP])
def test_the_number_of_timestamps_as_keys_is_limited(keys_per_map: int, first: bytes) -> None:
    head = b"\xde" + keys_per_map.to_bytes(2, "big")

    def maps(count: int) -> bytes:
        pairs = (b"\xd6\xff" + number.to_bytes(4, "big") + b"\xc0" for number in range(keys_per_map))
        return b"\xdd" + (count + 1).to_bytes(4, "big") + first + (head + b"".join(pairs)) * count

    most = MAX_TIME_KEYS // keys_per_map
    assert len(decode_value(maps(most))) == most + 1
    with pytest.raises(DecodeError, match="more than 32,768 timestamps per MiB as keys of maps"):
        decode_value(maps(most + 1))


def test_timestamps_as_keys_are_limited_for_typed_payloads_too() -> None:
    codec = TypedPayload(list[dict[datetime, None]])
    one = b"\x81\xd6\xff\x00\x01\x02\x03\xc0"
    assert len(codec.decode_slot(b"\xdd" + MAX_TIME_KEYS.to_bytes(4, "big") + one * MAX_TIME_KEYS)) == MAX_TIME_KEYS
    with pytest.raises(DecodeError, match="more than 32,768 timestamps"):
        codec.decode_slot(b"\xdd" + (MAX_TIME_KEYS + 1).to_bytes(4, "big") + one * (MAX_TIME_KEYS + 1))


def test_timestamps_that_are_not_keys_are_not_limited() -> None:
    times = array_of(b"\xd6\xff\x00\x01\x02\x03")
    assert len(decode_value(times)) > 5 * MAX_TIME_KEYS


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


#: Takes 13 us for each value.
ManyRights: Any = enum.IntFlag(  # type: ignore[misc]  # mypy wants a literal
    "ManyRights", {f"R{number}": 1 << number for number in range(60)}
)


class Colour(enum.Enum):
    RED = "red"

    @classmethod
    def _missing_(cls, value: object) -> Colour:
        return cls.RED


@pytest.mark.parametrize(
    ("kind", "item", "most"),
    [
        (list[Decimal], b"\x01", MAX_DECIMALS),
        (list[Decimal], b"\xa11", MAX_DECIMALS),
        (list[int | Decimal], b"\xa11", MAX_DECIMALS),
        (list[Rights], b"\x03", MAX_FLAGS),
        (list[Rights | None], b"\x03", MAX_FLAGS),
        (list[Colour], b"\xa1x", MAX_FLAGS),
    ],
)
def test_the_number_of_values_that_are_slow_to_build_is_limited(kind: Any, item: bytes, most: int) -> None:
    codec = TypedPayload(kind)
    codec.decode_slot(b"\xdd" + most.to_bytes(4, "big") + item * most)
    for count in (most + 1, SIZE // len(item)):
        with pytest.raises(DecodeError, match=f"has more than {most:,} values, the maximum for a type"):
            codec.decode_slot(b"\xdd" + count.to_bytes(4, "big") + item * count)


def test_flags_of_many_members_are_limited_more() -> None:
    codec = TypedPayload(list[ManyRights])
    codec.decode_slot(b"\xdc\x0c\x00" + b"\x03" * 0x0C00)
    with pytest.raises(DecodeError, match="has more than 3,276 values"):
        codec.decode_slot(b"\xdc\x14\x00" + b"\x03" * 0x1400)


def test_the_combinations_of_an_int_flag_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type_limits, "MAX_COMBINATIONS", 150)
    codec = TypedPayload(list[ManyRights])
    known = ManyRights._value2member_map_
    for first in range(1, 1000, 100):
        numbers = [*range(first, first + 100)]
        assert codec.decode_slot(encode_value(numbers)) == [ManyRights(number) for number in numbers]
        assert len(known) <= 150 + 100
    for first in range(1001, 2000, 100):
        with pytest.raises(DecodeError, match="payload is not a list"):
            codec.decode_slot(encode_value([*range(first, first + 100), "not a number"]))
        assert len(known) <= 150 + 100
    assert ManyRights["R0"] is ManyRights(1)
    (former,) = codec.decode_slot(encode_value([3]))
    type_limits._forget_combinations(ManyRights)
    assert former == ManyRights(3) == ManyRights["R0"] | ManyRights["R1"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (set[int], [number << 40 for number in range(isqrt(int(MAX_WORK / SET_OF_NUMBERS)) + 1)]),
        (set[UUID], [f"{number:032x}" for number in range(isqrt(MAX_WORK // UUID_KEYS) + 1)]),
        (list[Rights], [1] * (MAX_FLAGS + 1)),
    ],
)
def test_a_stored_result_that_is_slow_to_convert_stays_as_it_is(kind: Any, value: list[Any]) -> None:
    def function() -> None: ...

    function.__annotations__["return"] = kind
    results = Results(function)
    assert results.convert(value) is value
    fewer = value[: len(value) // 2]
    assert results.convert(fewer) == msgspec.convert(fewer, kind)


def test_a_list_of_dicts_beside_a_set_of_tuples_is_not_limited() -> None:
    def call(rows: list[dict[str, int]], edges: set[tuple[int, int]], tags: set[Any]) -> None: ...

    arguments = Arguments(call, "t")
    rows = [{"a": number, "b": number} for number in range(10_000)]
    packed = arguments.encode((), {"rows": rows, "edges": {(1, 2), (3, 4)}, "tags": {"x"}})
    assert arguments.decode(packed)["rows"] == rows


@pytest.mark.parametrize("kind", [set[int], frozenset[float | str], dict[str, set[int]]])
def test_the_number_of_members_of_a_set_that_are_not_text_is_limited(kind: Any) -> None:
    codec = TypedPayload(kind)

    def numbers(count: int) -> bytes:
        members: Any = [
            float(1000 * number) if kind == frozenset[float | str] else 1000 * number for number in range(count)
        ]
        return encode_value({"a": members} if kind == dict[str, set[int]] else members)

    most = isqrt(int(MAX_WORK / SET_OF_NUMBERS))
    codec.decode_slot(numbers(most))
    with pytest.raises(
        DecodeError, match="list of 8,193 values that are not text, too many for a type with a set: use list"
    ):
        codec.decode_slot(numbers(most + 1))


def tuples(count: int) -> list[list[int]]:
    """Return lists whose tuples all have the same hash."""
    return [[-1 if bit == "0" else -2 for bit in f"{number:018b}"] for number in range(count)]


class Labelled(msgspec.Struct, frozen=True):
    of: tuple[int, ...]


@dataclass(frozen=True)
class Noted:
    of: tuple[int, ...]


TUPLE_SETS = [
    set[tuple[int, ...]],
    set[frozenset[int]],
    set[Annotated[tuple[int, ...], msgspec.Meta(description="noted")]],
    set[int | tuple[int, ...]],
    set,
    frozenset[Any],
]


@pytest.mark.parametrize("kind", TUPLE_SETS)
def test_the_number_of_tuples_in_a_set_is_limited(kind: Any) -> None:
    codec = TypedPayload(kind)
    # Each of n tuples is compared with all others: n times the 19 n values in all of them.
    most = isqrt(int(MAX_WORK / SET_OF_TUPLES / 19)) - 5
    codec.decode_slot(encode_value(tuples(most)))
    with pytest.raises(DecodeError, match=r"a list of \d+ values that are not text, too many for a type with a set"):
        codec.decode_slot(encode_value(tuples(most + 10)))


def test_the_values_in_tuples_count() -> None:
    codec = TypedPayload(set[tuple[tuple[str, ...], tuple[int, ...]]])
    shared = ["x"] * 300
    codec.decode_slot(encode_value([[shared, one] for one in tuples(70)]))
    with pytest.raises(DecodeError, match="a list of 200 values that are not text"):
        codec.decode_slot(encode_value([[shared, one] for one in tuples(200)]))


@pytest.mark.parametrize("kind", [set[Labelled], set[Noted]])
def test_the_number_of_objects_in_a_set_is_limited(kind: Any) -> None:
    codec = TypedPayload(kind)
    codec.decode_slot(encode_value([{"of": one} for one in tuples(50)]))
    with pytest.raises(DecodeError, match="a list of 400 values that are not text"):
        codec.decode_slot(encode_value([{"of": one} for one in tuples(400)]))
    with pytest.raises(DecodeError, match="a list of 40 values that are not text"):
        codec.decode_slot(encode_value([{"of": [0] * 300 + one} for one in tuples(40)]))


def test_many_small_sets_of_tuples_are_limited_together() -> None:
    codec = TypedPayload(list[set[tuple[int, ...]]])
    codec.decode_slot(encode_value([tuples(UNCOUNTED_MEMBERS)] * 100))
    with pytest.raises(DecodeError, match="a list of 64 values that are not text, too many"):
        codec.decode_slot(encode_value([tuples(64)] * 100))


def test_keys_of_maps_are_limited_beside_sets_of_tuples() -> None:
    with pytest.raises(DecodeError, match="a map with 2,049 keys that are not all text"):
        TypedPayload(list[dict[int, None] | set[tuple[int, int]]]).decode_slot(b"\x91" + integer_map(spread(2049)))


def uuids(count: int) -> list[bytes]:
    """Return the MessagePack of UUIDs of one hash: Python takes the remainder by a Mersenne prime."""
    return [b"\xc4\x10" + UUID(int=5 + number * (2**61 - 1)).bytes for number in range(count)]


def uuid_map(count: int) -> bytes:
    return b"\xde" + count.to_bytes(2, "big") + b"".join(one + b"\xc0" for one in uuids(count))


def test_text_that_becomes_uuids_counts_as_a_number() -> None:
    members, keys = TypedPayload(set[UUID]), TypedPayload(dict[UUID, None])
    most = isqrt(MAX_WORK // UUID_KEYS)
    assert len(members.decode_slot(b"\xdc" + most.to_bytes(2, "big") + b"".join(uuids(most)))) == most
    assert len(keys.decode_slot(uuid_map(most))) == most
    with pytest.raises(DecodeError, match="a list of 1,025 values"):
        members.decode_slot(b"\xdc" + (most + 1).to_bytes(2, "big") + b"".join(uuids(most + 1)))
    with pytest.raises(DecodeError, match=r"a map with 1,025 keys .* at most 1,024 are allowed"):
        keys.decode_slot(uuid_map(most + 1))
    with pytest.raises(DecodeError, match="a map with 64 keys"):
        TypedPayload(list[dict[UUID, None]]).decode_slot(b"\xdc\x03\x00" + uuid_map(64) * 768)
    # As values, they are not hashed.
    assert len(TypedPayload(list[UUID]).decode_slot(b"\xdc\x10\x00" + b"".join(uuids(4096)))) == 4096


def test_other_text_beside_uuids_is_not_limited() -> None:
    def call(rows: list[dict[str, int]], ids: set[UUID], prices: dict[Decimal, int], names: list[str]) -> None: ...

    arguments = Arguments(call, "t")
    rows = [{f"column {number}": number for number in range(12)}] * 4000
    names = [f"name {number}" for number in range(5000)]
    given = {"rows": rows, "ids": {UUID(int=1)}, "prices": {Decimal("1.50"): 1}, "names": names}
    assert arguments.decode(arguments.encode((), given)) == given
    prices = {str(number): 1 for number in range(1025)}
    with pytest.raises(DecodeError, match=r"a map with 1,026 keys .*UUIDs and Decimals"):
        TypedPayload(dict[Decimal, int]).decode_slot(encode_value({**prices, "note": 1}))


class Leaf(msgspec.Struct, tag="leaf"):
    data: bytes


class Branch(msgspec.Struct, tag="branch"):
    child: Branch | Leaf


def test_the_levels_of_tagged_unions_are_limited_in_large_payloads() -> None:
    """With its tag last, an object is skipped first: all levels below are read once for each level above."""
    codec = TypedPayload(Branch)

    def branches(levels: int, size: int) -> bytes:
        packed = b"\x82\xa4data\xc6" + size.to_bytes(4, "big") + bytes(size) + b"\xa4type\xa4leaf"
        for _ in range(levels - 1):
            packed = b"\x82\xa5child" + packed + b"\xa4type\xa6branch"
        return packed

    codec.decode_slot(branches(16, 1_000_000))
    codec.decode_slot(branches(200, 60_000))
    with pytest.raises(DecodeError, match="has more than 16 levels, the maximum at this size"):
        codec.decode_slot(branches(17, 1_048_000))


def test_limits_hold_for_all_arguments_of_a_call_together() -> None:
    def call(members: set[int], **more: Any) -> None: ...

    arguments = Arguments(call, "t")
    numbers = [number * 1000 for number in range(20_000)]
    arguments.decode(arguments.encode((), {"members": {1}, "more": numbers[:8000]}))
    with pytest.raises(EncodeError, match=r"too many for a type with a set.*nothing was sent"):
        arguments.encode((), {"members": {1}, "more": numbers})


def test_the_number_of_values_beside_a_set_is_limited() -> None:
    codec = TypedPayload(list[set[int]])
    one = b"\xdc\x00\x13" + bytes(range(19))
    codec.decode_slot(b"\xdc\x32\x00" + one * 0x3200)
    with pytest.raises(DecodeError, match="has more than 262,144 values"):
        codec.decode_slot(b"\xdc\x40\x00" + one * 0x4000)


def test_sets_of_text_and_of_consecutive_integers_are_not_limited() -> None:
    assert len(TypedPayload(set[str]).decode_slot(encode_value([str(number) for number in range(50_000)]))) == 50_000
    for numbers in (range(7, 50_000), {*range(30_000, 39_000)}, {*range(-5000, 5000)}):  # sets are not in order
        assert len(TypedPayload(set[int]).decode_slot(encode_value([*numbers]))) == len(numbers)
    assert len(TypedPayload(list[int]).decode_slot(encode_value([*range(0, 10**8, 1000)]))) == 100_000


class Node(msgspec.Struct):
    child: Node | None = None


@pytest.mark.parametrize("kind", [list, Any, Node])
def test_a_typed_payload_of_too_many_levels_is_not_added(kind: Any) -> None:
    codec = TypedPayload(kind)

    def nested(levels: int) -> Any:
        value: Any = Node() if kind is Node else []
        for _ in range(levels - 1):
            value = Node(value) if kind is Node else [value]
        return value

    codec.decode_slot(codec.encode(nested(MAX_NESTING)))
    with pytest.raises(EncodeError, match="more than 512 levels"):
        codec.encode(nested(MAX_NESTING + 1))


def test_a_result_that_callers_could_not_decode_is_not_stored() -> None:
    def rows() -> list[list[int]]:
        return []

    def counts() -> dict[str, int]:
        return {}

    for function, result in (
        (rows, [[1]] * MAX_CONTAINERS),
        (counts, {f"{number:x}": number for number in range(MAX_LARGE_KEYS + 1)}),
    ):
        with pytest.raises(EncodeError, match="more than"):
            Results(function).encode(result)


def test_text_and_bytes_do_not_count_as_containers() -> None:
    for value in ("\u0410\u0420" * (1 << 18), b"\x90" * SIZE):
        assert decode_value(encode_value(value)) == value


def test_a_struct_with_a_thousand_unknown_fields_is_refused() -> None:
    def envelope(unknown: int) -> bytes:
        known = b"\xa2id\xa1a\xa7payload\x01\xadcreated_at_ms\x05"
        more = b"".join(b"\xa6" + b"%06d" % number + b"\x01" for number in range(unknown))
        return b"\xde" + (3 + unknown).to_bytes(2, "big") + known + more

    assert decode_job(envelope(MAX_FIELDS - 3)).id == "a"
    with pytest.raises(DecodeError, match="at most 1000 fields"):
        decode_job(envelope(MAX_FIELDS))


def test_unknown_kinds_of_backoff_are_not_cached() -> None:
    before = _known_retry.cache_info().currsize
    for number in range(100):
        retry = from_wire_retry(WireRetry(3, WireBackoff(f"kind {number}", 5, None, None, None)))
        assert retry == JobRetryOverride(3, BackoffSpec(BackoffKind.UNKNOWN, 5))
    assert _known_retry.cache_info().currsize == before
