"""Payloads made to be slow, and what is refused: depth, arrays and maps as keys, and too many fields."""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from typing import TYPE_CHECKING, Any, get_type_hints
from uuid import UUID

import msgspec
import pytest

from tampu.errors import DecodeError, EncodeError
from tampu.wire import decode_job, decode_result, decode_spec
from tampu.wire.payload import MAX_NESTING, decode_slot, decode_value, encode_value, wrap_bin
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
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIZE = 1 << 20
#: Four times what the slowest takes, a MiB of empty lists on Python 3.11; a quadratic decoder needs minutes.
LIMIT_SECS = 2
ARRAY_KEY = b"\x81\x91\x01\x02"
MAP_KEY = b"\x81\x80\x02"


def map_of(keys: Iterable[bytes]) -> bytes:
    """Return a map of about a MiB with these keys."""
    pairs, size = [], 0
    for key in keys:
        pairs.append(key + b"\xc0")
        size += len(key) + 1
        if size > SIZE - 64:
            break
    return b"\xdf" + len(pairs).to_bytes(4, "big") + b"".join(pairs)


def array_of(items: bytes) -> bytes:
    """Return an array of about a MiB of `items`, which is one value."""
    count = (SIZE - 5) // len(items)
    return b"\xdd" + count.to_bytes(4, "big") + items * count


HOSTILE: dict[str, Callable[[], bytes]] = {
    # hash(-1) == hash(-2): arrays of them all collide.
    "array keys": lambda: map_of(
        b"\xdc\x00\x12" + bytes(0xFF if bit == "0" else 0xFE for bit in f"{number:018b}") for number in range(1 << 18)
    ),
    # msgpack's own timestamps hash to seconds + nanoseconds.
    "timestamps": lambda: map_of(b"\xd7\xff" + struct.pack(">Q", (10**9 - n << 34) | n) for n in range(1 << 17)),
    "text keys": lambda: map_of(b"\xa5" + b"%05x" % number for number in range(1 << 18)),
    "extensions": lambda: array_of(b"\xd4\x05\x00"),
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
    for read in (decode_value, decode_result, READERS["slot"], READERS["untyped argument"]):
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
    def node() -> Node: ...  # type: ignore[empty-body]

    with pytest.raises(EncodeError, match="as the key of a map"):
        Results(node).encode({"child": None, "unknown": {(1, 2): 3}})


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


def members(value: set[UUID], scattered: dict[int, str], rows: list[dict[str, int]]) -> None:
    """Take arguments that an early limit of hashes and containers refused."""


@pytest.mark.parametrize("kind", ["argument", "result"])
def test_large_sets_scattered_keys_and_many_rows_pass(kind: str) -> None:
    values: dict[str, Any] = {
        "value": {UUID(int=number) for number in range(2_500)},
        "scattered": {number * 7919: str(number) for number in range(6_000)},
        "rows": [{"n": number} for number in range(90_000)],
    }
    if kind == "argument":
        arguments = Arguments(members, "members")
        assert arguments.decode(wrap_bin(arguments.encode((), values))) == values
        return
    for name, value in values.items():

        def give() -> None: ...

        give.__annotations__ = {"return": get_type_hints(members)[name]}
        results = Results(give)
        assert results.convert(decode_result(results.encode(value))) == value
