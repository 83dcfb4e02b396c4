"""Entries that cannot run become dead letters that keep their contents."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from consume.workers import consuming
from support.waiting import until
from tampu.consume import inflight
from tampu.consume.settle import HELD_RETRY_SECS, MAX_UNWRITTEN
from tampu.wire.envelope import decode_job, encode_envelope

if TYPE_CHECKING:
    from consume.views import WorkerView
    from tampu.wire.job import Job


@dataclass
class Invoice:
    number: int


async def noop(job: Job[Any]) -> None:
    return None


async def reads_payload(job: Job[Any]) -> None:
    assert job.payload is not job


@pytest.mark.servers
async def test_an_entry_without_a_payload_keeps_all_its_fields(view: WorkerView) -> None:
    """Finding 7."""
    async with consuming(view.server.url, noop, consumer_id="w-1"):
        source_id = view.add_fields("x", "1", "n", "lost?", "y", b"\xff\x00")
        await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
        good = view.add()
        await until(lambda: "completed" in view.event_names(good), "the next job is done")
    (letter,) = view.dead_letters()
    assert (letter.reason, letter.source_id) == ("malformed", source_id)
    assert letter.detail == "missing or non-bytes payload field"
    assert (letter.payload, letter.name, letter.attempts) == (b"", "lost?", 0)
    assert letter.original == ((b"x", b"1"), (b"n", b"lost?"), (b"y", b"\xff\x00"))
    flat = view.flat(view.keys.dlq)[0]
    assert flat[:10:2] == ["d", "n", "source_id", "reason", "detail"]
    (event,) = [event for event in view.events() if event["e"] == "dlq"]
    assert (event["id"], event["attempt"], event["reason"], event["n"]) == ("", "0", "malformed", "lost?")


@pytest.mark.servers
async def test_bytes_that_are_not_an_envelope_are_kept_with_their_name(view: WorkerView) -> None:
    """Finding 7."""
    garbage = b"\xc1\xff not a job"
    async with consuming(view.server.url, noop):
        view.add_fields("d", garbage, "n", "who")
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert (letter.reason, letter.payload, letter.name) == ("decode_failed", garbage, "who")
    assert letter.detail is None
    assert letter.error_type == "DecodeError"
    assert "not a job envelope" in letter.error
    assert [event["e"] for event in view.events() if event["e"] != "drained"] == ["dlq"]


@pytest.mark.servers
async def test_an_envelope_over_the_limit_is_dead_lettered_undecoded(view: WorkerView) -> None:
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)

    fits = encode_envelope("fits", b"\xc4\x02\xa1x", 0)
    limit = len(fits)
    async with consuming(view.server.url, handler, max_payload_bytes=limit):
        view.add_fields("d", fits + b"\x00", "n", "big")
        view.add_fields("d", fits)
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert (letter.reason, letter.payload, letter.name) == ("oversize_payload", fits + b"\x00", "big")
    assert runs == ["fits"]


async def test_the_first_of_two_fields_counts_and_others_are_ignored(view: WorkerView) -> None:
    seen: list[tuple[str, str]] = []

    async def handler(job: Job[Any]) -> None:
        seen.append((job.id, job.name))

    first, second = (encode_envelope(name, b"\xc4\x01\xc0", 0) for name in ("first", "second"))
    async with consuming(view.server.url, handler):
        view.add_fields("z", "?", "n", "name", "d", first, "d", second, "n", "other")
        view.add_fields("d", first, "n", b"\xff\xfe")
        await until(view.is_settled, "both are done")
    assert seen == [("first", "name"), ("first", "")]


async def test_an_undecodable_inner_payload_is_a_dead_letter_at_once(view: WorkerView) -> None:
    envelope = encode_envelope("job-x", b"\xc4\x01\xc1", 0)
    async with consuming(view.server.url, reads_payload, max_attempts=5):
        view.add_fields("d", envelope, "n", "who")
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert (letter.reason, letter.payload, letter.name, letter.attempts) == ("decode_failed", envelope, "who", 1)
    assert letter.error_type == "DecodeError"
    assert view.event_names("job-x") == ["active", "failed", "dlq"]


async def test_a_payload_that_is_never_read_is_never_decoded(view: WorkerView) -> None:
    async with consuming(view.server.url, noop):
        view.add_fields("d", encode_envelope("job-x", b"\xc4\x01\xc1", 0))
        await until(lambda: "completed" in view.event_names("job-x"), "it is done")


async def test_another_decode_error_of_a_handler_is_an_ordinary_failure(view: WorkerView) -> None:
    runs: list[int] = []
    other: Job[Any] = decode_job(encode_envelope("another", b"\xc4\x01\xc1", 0))

    async def handler(job: Job[Any]) -> None:
        runs.append(job.attempt)
        if job.attempt == 0:
            print(other.payload)

    async with consuming(view.server.url, handler):
        view.add()
        await until(lambda: len(runs) == 2 and view.is_settled(), "it was retried")
    assert not view.dead_letters()


async def test_typed_payloads_arrive_typed_and_misfits_are_dead_letters(view: WorkerView) -> None:
    seen: list[Any] = []

    async def handler(job: Job[Invoice]) -> None:
        seen.append(job.payload)

    async with consuming(view.server.url, handler, payload_type=Invoice, max_attempts=5):
        view.add({"number": 7})
        view.add({"number": "seven"}, name="misfit")
        (letter,) = await until(view.dead_letters, "the misfit is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert seen == [Invoice(7)]
    assert (letter.reason, letter.name) == ("decode_failed", "misfit")
    assert "Invoice" in letter.error


@pytest.mark.servers("valkey", "redis86")
async def test_a_flood_of_garbage_neither_stops_the_queue_nor_fills_memory(view: WorkerView) -> None:
    """If dead letters cannot be written, reading stops after a while and resumes once they can."""
    pipeline = view.client.pipeline(transaction=False)
    for number in range(3000):
        pipeline.execute_command("XADD", view.keys.stream, "*", "d", msgspec.msgpack.encode(number))
    pipeline.execute()
    job_id = view.add()
    view.client.set(view.keys.dlq, "wrong type")
    async with consuming(view.server.url, noop, concurrency=2) as worker:
        await until(lambda: len(view.pending()) >= MAX_UNWRITTEN, "many are held")
        tried_until = time.monotonic() + 3 * HELD_RETRY_SECS
        await until(lambda: time.monotonic() > tried_until, "it has retried several times")
        assert len(view.pending()) <= max(MAX_UNWRITTEN, 4 * worker.config.ack_batch) + 2
        view.client.delete(view.keys.dlq)
        await until(view.is_settled, "all are settled")
    assert view.client.xlen(view.keys.dlq) == 3000
    assert "completed" in view.event_names(job_id)


@pytest.mark.parametrize(
    ("name", "job_id", "detail"),
    [("x" * 257, "a", "a name of over 256 bytes"), ("é" * 129, "a", "a name of over 256 bytes"),
     ("x" * 9_000_000, "a", "a name of over 256 bytes"), ("ok", "i" * 65_537, "a job ID of over 65536 bytes")],
    ids=["bytes", "letters", "megabytes", "id"],
)  # fmt: skip
async def test_an_entry_with_a_long_name_or_id_is_dead_lettered(
    view: WorkerView, name: str, job_id: str, detail: str
) -> None:
    async with consuming(view.server.url, noop):
        view.add_fields("d", encode_envelope(job_id, b"\xc0", 5), "n", name)
        (letter,) = await until(view.dead_letters, "it is dead-lettered")
        await until(view.is_settled, "nothing is left")
    assert (letter.reason, letter.detail) == ("malformed", detail)
    assert len(letter.name.encode()) <= 256
    assert decode_job(letter.payload).id == job_id


async def test_a_name_of_256_bytes_is_run(view: WorkerView) -> None:
    async with consuming(view.server.url, noop):
        view.add_fields("d", encode_envelope("a", b"\xc0", 5), "n", "é" * 128)
        await until(lambda: "completed" in view.event_names("a"), "it is done")


async def test_an_entry_of_many_megabytes_is_not_kept_in_its_dead_letter(view: WorkerView) -> None:
    async with consuming(view.server.url, noop):
        view.add_fields("d", b"x" * 5_000_000)
        view.add_fields("y", b"x" * 5_000_000)
        await until(lambda: len(view.dead_letters()) == 2, "both are dead-lettered")
    oversize, malformed = sorted(view.dead_letters(), key=lambda letter: letter.reason, reverse=True)
    assert (oversize.reason, oversize.payload) == ("oversize_payload", b"")
    assert oversize.detail == "5,000,000 bytes are not kept, over 4,194,304"
    assert (malformed.reason, malformed.original) == ("malformed", None)


async def test_an_unexpected_error_of_the_decoder_costs_one_entry(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to end the read: the other entries of the batch stayed pending, and were read again with it."""

    def decode(data: bytes, name: str = "") -> Job[Any]:
        if name == "poison":
            raise RecursionError("too deep")
        return decode_job(data, name)

    monkeypatch.setattr(inflight, "decode_job", decode)
    before = view.add()
    poison = view.add(name="poison")
    after = view.add()
    async with consuming(view.server.url, noop):
        await until(lambda: all("completed" in view.event_names(job_id) for job_id in (before, after)), "others run")
        await until(view.is_settled, "nothing is left")
    (letter,) = view.dead_letters()
    assert (letter.reason, letter.error_type, letter.name) == ("decode_failed", "RecursionError", "poison")
    assert decode_job(letter.payload).id == poison
    assert "internal error (please report it)" in caplog.text
