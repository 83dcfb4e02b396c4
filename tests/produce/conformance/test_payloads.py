"""Payloads: both formats, and typed payloads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypedDict

import msgpack
import msgspec
import pytest

from support.producers import open_producer
from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.payload import decode_value
from tampu.wire.repeat import RepeatableSpec, RepeatPattern
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from servers.cluster import Cluster
    from servers.process import Server
    from support.queues import QueueView


@pytest.mark.servers
@pytest.mark.parametrize("value", [None, True, 7, -1, 2.5, "text", [1, [2]], {"a": {"b": []}}, "x" * 300, {}])
async def test_both_formats_round_trip_any_value(server: Server | Cluster, view: QueueView, value: Any) -> None:
    packed = msgpack.packb(value, use_bin_type=True)
    for payload_format in ("bin", "inline"):
        async with open_producer(server.url, payload_format=payload_format) as producer:
            await producer.add(value)
            await producer.add_bulk([value, value])
            await producer.add_in(60, value)
        jobs = [*view.jobs(), *view.delayed_jobs()]
        slot = packed if payload_format == "inline" else msgpack.packb(packed, use_bin_type=True)
        assert [job.payload_slot for job in jobs] == [slot] * 4
        assert [job.payload for job in jobs] == [value] * 4
        assert {job.payload_format for job in jobs} == {payload_format}
        view.client.delete(view.keys.stream, view.keys.delayed)


@pytest.mark.servers
async def test_bytes_are_refused_inline_as_they_look_like_a_bin(server: Server | Cluster, view: QueueView) -> None:
    async with open_producer(server.url, payload_format="inline") as producer:
        for attempt in (
            producer.add(b"bytes"),
            producer.add_bulk([b"bytes"]),
            producer.add_bulk(iter([b"bytes"])),
            producer.add_in(60, b"bytes"),
            producer.add_bulk_named([("n", b"bytes")]),
            producer.upsert_repeatable(RepeatableSpec("r", RepeatPattern.every(1000), b"bytes")),
        ):
            with pytest.raises(EncodeError, match="bytes need payload_format 'bin'"):
                await attempt
        await producer.add({"inside": b"fine"})
    assert view.payloads() == [{"inside": b"fine"}]
    async with open_producer(server.url) as producer:
        await producer.add(b"bytes")
    assert view.payloads()[1] == b"bytes"


# --- typed payloads


@dataclass
class Invoice:
    number: int
    amount: Decimal
    due: datetime | None = None


class Mail(msgspec.Struct):
    to: str
    tags: list[str] = []


class Point(TypedDict):
    x: int
    y: int


@pytest.mark.servers
@pytest.mark.parametrize(
    ("payload_type", "value", "written"),
    [
        (Invoice, Invoice(7, Decimal("1.10")), {"number": 7, "amount": "1.10", "due": None}),
        (Mail, Mail("ada", ["a"]), {"to": "ada", "tags": ["a"]}),
        (Point, {"x": 1, "y": 2}, {"x": 1, "y": 2}),
        (list[int], [1, 2], [1, 2]),
        (int, 5, 5),
    ],
)
async def test_a_typed_payload_is_written_and_read_back(
    server: Server | Cluster, view: QueueView, payload_type: Any, value: Any, written: Any
) -> None:
    async with open_producer(server.url, payload_type=payload_type) as producer:
        await producer.add(value)
        await producer.add_bulk([value] * 2)
        await producer.add_bulk(iter([value]))
        await producer.add_in(60, value)
    jobs = [*view.jobs(), *view.delayed_jobs()]
    assert [job.payload for job in jobs] == [written] * 5
    assert [TypedPayload(payload_type).decode_slot(job.payload_slot) for job in jobs] == [value] * 5


async def test_a_payload_of_the_wrong_type_is_not_sent(server: Server, view: QueueView) -> None:
    async with open_producer(server.url, payload_type=Invoice) as producer:
        for wrong in ({"number": "seven"}, 5, Mail("x"), Invoice("seven", Decimal(1)), None):  # type: ignore[arg-type]
            with pytest.raises(EncodeError, match="is not a Invoice") as caught:
                await producer.add(wrong)
            assert caught.value.code == "CMQ-002"
        with pytest.raises(EncodeError, match="payload 1 of this bulk"):
            await producer.add_bulk([Invoice(1, Decimal(1)), "no"])
        assert (await producer.add(Invoice(1, Decimal(1), datetime(2030, 1, 1, tzinfo=UTC)))).is_new
    assert view.length() == 1


def test_an_unsupported_payload_type_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot be encoded as MessagePack"):
        TypedPayload(list[int] | set[int])


def test_reading_a_payload_of_the_wrong_type_is_a_decode_error() -> None:
    typed = TypedPayload(Invoice)
    with pytest.raises(DecodeError, match="is not a Invoice"):
        typed.decode_slot(msgpack.packb(msgpack.packb({"number": "x"})))
    with pytest.raises(DecodeError):
        typed.decode_slot(b"\xc1")


async def test_pydantic_models_are_payload_types_too(server: Server, view: QueueView) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Order(pydantic.BaseModel):
        number: int
        amount: Decimal
        at: datetime

    order = Order(number=7, amount=Decimal("1.10"), at=datetime(2030, 1, 1, tzinfo=UTC))
    async with open_producer(server.url, payload_type=Order) as producer:
        await producer.add(order)
        await producer.add_bulk([{"number": "8", "amount": "2", "at": "2030-01-01T00:00:00Z"}])
        with pytest.raises(EncodeError, match="is not a Order"):
            await producer.add({"number": "x"})
    typed = TypedPayload(Order)
    first, second = (typed.decode_slot(job.payload_slot) for job in view.jobs())
    assert first == order
    assert second.number == 8
    with pytest.raises(DecodeError, match="is not a Order"):
        typed.decode_slot(msgpack.packb({"number": "x"}))


async def test_values_without_a_faithful_form_are_refused(server: Server, view: QueueView) -> None:
    async with open_producer(server.url) as producer:
        for value in (Decimal(1), {1, 2}, datetime(2030, 1, 1), object(), 2**64, Invoice(1, Decimal(1)), 1j):
            with pytest.raises(EncodeError, match="no faithful MessagePack form"):
                await producer.add(value)
        aware = datetime(2030, 1, 1, tzinfo=UTC)
        await producer.add(aware)
    ((_, fields),) = view.entries()
    assert decode_value(msgpack.unpackb(fields[1])[1]) == aware
