"""Queues with a codec: payloads and results are sealed on the server, and whatever is not sealed does not run."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from api.process_tasks import CODEC, sealed_queue
from cli.lab import invoke
from support.waiting import until
from tampu import BackoffSpec, Consumer, ConsumerConfig, EncryptedCodec, FailedJob, Job, Queue, SignedCodec, Worker
from tampu.errors import ConfigError, DecodeError, JobFailed, ResultNotStored
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.payload import encode_value, wrap_bin

if TYPE_CHECKING:
    from servers.process import Server

KEY = bytes(range(32))
SECRET = "s3cret payload"
CODECS: list[SignedCodec | EncryptedCodec] = [SignedCodec({"k": KEY}), EncryptedCodec({"k": KEY})]

codecs = pytest.mark.parametrize("codec", CODECS, ids=["signed", "encrypted"])


def stored(server: Server) -> bytes:
    """Return everything on the server as one text."""
    client: Any = server.client()
    return b"".join(client.dump(key) for key in client.scan_iter())


@codecs
async def test_tasks_run_and_return_results(server: Server, codec: SignedCodec | EncryptedCodec) -> None:
    async with Queue("q", url=server.url, codec=codec) as queue:

        @queue.task
        async def shout(text: str) -> str:
            return text.upper()

        @queue.task
        def whisper(text: str) -> str:
            return text.lower()

        async with Worker(queue):
            jobs: list[Job[Any]] = [
                await shout.add(SECRET),
                await whisper.add(SECRET),
                *await shout.add_bulk(["a", "b"]),
            ]
            jobs.append(await shout.add_in(0.01, "later"))
            jobs.append(await queue.add("shout", {"text": "by name"}))
            jobs += await queue.add_bulk([{"name": "shout", "data": {"text": "bulk"}}])
            results = [await job.result(20) for job in jobs]
        assert results == [SECRET.upper(), SECRET, "A", "B", "LATER", "BY NAME", "BULK"]
        assert await queue.get_job_result(jobs[0].id) == SECRET.upper()
        assert (await queue.get_job(jobs[0].id)).result == SECRET.upper()


async def test_nothing_on_the_server_shows_an_encrypted_payload_or_result(server: Server) -> None:
    async with Queue("q", url=server.url, codec=CODECS[1]) as queue:

        @queue.task(attempts=2, backoff=BackoffSpec.fixed(60_000))
        async def fail(text: str) -> None:
            raise ValueError("no payload in here")

        @queue.task
        async def echo(text: str) -> str:
            return text

        async with Worker(queue):
            await fail.add(SECRET)
            await fail.using(attempts=1).add(SECRET)
            await echo.add_in(3600, SECRET)
            await echo.every(3600, {"text": SECRET})
            assert await (await echo.add(SECRET)).result(20) == SECRET
            await until(lambda: server.client().xlen(queue.keys.dlq) == 1, "one is a dead letter")
        assert SECRET.encode() not in stored(server)
        assert SECRET[2:].encode() not in stored(server)


@codecs
async def test_a_forged_job_never_runs(server: Server, codec: SignedCodec | EncryptedCodec) -> None:
    ran = []
    async with Queue("q", url=server.url, codec=codec) as queue:

        @queue.task(attempts=1)
        async def pay(amount: int) -> None:
            ran.append(amount)

        @queue.task(attempts=1)
        async def note(amount: int) -> None: ...

        client: Any = server.client()
        job = await note.add(5)
        ((_, fields),) = client.xrange(queue.keys.stream)
        signed_for_note = decode_job(fields[b"d"]).payload_slot
        plain = wrap_bin(encode_value({"amount": 1}))
        stranger = QueueWith(type(codec)({"k": bytes(32)}), server)
        for slot in (plain, signed_for_note, await stranger.slot("pay", {"amount": 2})):
            client.xadd(queue.keys.stream, {"d": encode_envelope("forged", slot, 5), "n": "pay"})
        async with Worker(queue):
            await until(lambda: client.xlen(queue.keys.dlq) == 3, "all three are dead letters")
            await job.result(20)
        letters = await queue.peek_dlq()
        assert {letter["reason"] for letter in letters} == {"decode_failed"}
        assert ran == []


class QueueWith:
    """Someone who can write to the server, and has another key."""

    def __init__(self, codec: SignedCodec | EncryptedCodec, server: Server) -> None:
        self._codec = codec
        self._url = server.url

    async def slot(self, name: str, value: Any) -> bytes:
        from tampu.wire.codec import QueueCodec

        return wrap_bin(QueueCodec(self._codec, "q").seal_payload(encode_value(value), name))


class FailingCodec:
    """A codec of an application that cannot seal results."""

    def seal(self, plain: bytes, context: bytes) -> bytes:
        if context.startswith(b"result"):
            raise RuntimeError("no key service")
        return plain

    def open(self, sealed: bytes, context: bytes) -> bytes:
        return sealed


async def test_a_job_whose_result_cannot_be_sealed_has_succeeded(server: Server) -> None:
    async with Queue("q", url=server.url, codec=FailingCodec()) as queue:

        @queue.task(attempts=1)
        async def echo(text: str) -> str:
            return text

        async with Worker(queue):
            with pytest.raises(ResultNotStored, match="no key service"):
                await (await echo.add("x")).result(20)


class FalsyCodec(SignedCodec):
    """A codec that is false as a condition, as one that counts its keys may be."""

    def __bool__(self) -> bool:
        return False


@pytest.mark.parametrize("has_codec", ["queue", "worker", "queue of a handler"])
@pytest.mark.parametrize("kind", [SignedCodec, FalsyCodec])
async def test_a_plain_job_does_not_run_wherever_the_codec_is_set(
    server: Server, has_codec: str, kind: type[SignedCodec]
) -> None:
    ran = []
    codec = kind({"k": KEY})
    async with Queue("q", url=server.url, codec=None if has_codec == "worker" else codec) as queue:

        @queue.task(attempts=1)
        async def pay(amount: int) -> None:
            ran.append(amount)

        async def handle(job: Job[Any]) -> None:
            ran.append(job.payload)

        async with Queue("q", url=server.url) as forger:
            await forger.add("pay", {"amount": 1})
        handler = handle if has_codec == "queue of a handler" else None
        async with Worker(queue, handler, codec=codec if has_codec == "worker" else None):
            await until(lambda: ran or server.client().xlen(queue.keys.dlq), "it has run or is a dead letter")
        assert ran == []
        assert [letter["reason"] for letter in await queue.peek_dlq()] == ["decode_failed"]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_consumer_does_not_run_a_plain_job_whose_payload_its_handler_ignores(
    server: Server, is_async: bool
) -> None:
    ran = []

    async def on_loop(job: Job[Any]) -> None:
        ran.append(job.id)

    def in_thread(job: Job[Any]) -> None:
        ran.append(job.id)

    async with Queue("q", url=server.url) as forger:
        await forger.add("pay", {"amount": 1})
        shutdown = asyncio.Event()
        consumer = Consumer(server.url, ConsumerConfig(queue_name="q", codec=CODECS[0]))
        running = asyncio.create_task(consumer.run(on_loop if is_async else in_thread, shutdown))
        await until(lambda: ran or server.client().xlen(forger.keys.dlq), "it has run or is a dead letter")
        shutdown.set()
        await running
        assert ran == []


@codecs
async def test_a_forged_result_is_refused(server: Server, codec: SignedCodec | EncryptedCodec) -> None:
    async with Queue("q", url=server.url, codec=codec) as queue:
        job = await queue.add("t", 1)
        server.client().set(queue.keys.result(job.id), encode_value("forged"))
        with pytest.raises(DecodeError, match="neither encrypted nor signed"):
            await job.result(20)
        with pytest.raises(DecodeError):
            await queue.get_job_result(job.id)


@codecs
async def test_dead_letters_are_replayed(server: Server, codec: SignedCodec | EncryptedCodec) -> None:
    seen = []
    async with Queue("q", url=server.url, codec=codec) as queue:

        @queue.task(attempts=1)
        async def flaky(number: int) -> None:
            seen.append(number)
            if len(seen) == 1:
                raise ValueError("the first time")

        async with Worker(queue):
            job = await flaky.add(7)
            with pytest.raises(JobFailed):
                await job.result(20)
            assert await queue.replay_dlq() == 1
            await until(lambda: len(seen) == 2, "it ran again")
    assert seen == [7, 7]


@codecs
async def test_a_handler_gets_opened_payloads(server: Server, codec: SignedCodec | EncryptedCodec) -> None:
    async def handle(job: Job[Any]) -> Any:
        return job.payload

    async with Queue("q", url=server.url, codec=codec) as queue, Worker(queue, handle, store_results=True):
        assert await (await queue.add("any", {"a": b"bytes"})).result(20) == {"a": b"bytes"}
        assert await (await queue.add("any", b"bytes")).result(20) == b"bytes"


async def test_a_task_in_a_process_gets_its_payload_without_the_keys(server: Server) -> None:
    queue, task = sealed_queue(server.url)
    async with queue, Worker(queue):
        assert await (await task.add(20)).result(60) == 400
    assert CODEC in vars(queue._config).values()


@codecs
async def test_the_same_schedule_is_registered_once(server: Server, codec: SignedCodec | EncryptedCodec) -> None:
    async with Queue("q", url=server.url, codec=codec) as queue:

        @queue.task
        async def tick(text: str) -> None: ...

        key = queue.keys.repeat_spec(await tick.every(3600, {"text": "a"}))
        spec = server.client().hget(key, "spec")
        await tick.every(3600, {"text": "a"})
        assert server.client().hget(key, "spec") == spec
        await tick.every(3600, {"text": "b"})
        assert server.client().hget(key, "spec") != spec


async def test_synchronous_code_uses_the_codec_too(server: Server) -> None:
    queue = Queue("q", url=server.url, codec=CODECS[1])
    await asyncio.to_thread(queue.sync.add, "t", SECRET)
    await queue.close()
    assert SECRET.encode() not in stored(server)


def test_a_codec_needs_the_format_bin() -> None:
    with pytest.raises(ConfigError, match="payload_format must be 'bin' with a codec"):
        Queue("q", codec=CODECS[0], payload_format="inline")
    with pytest.raises(ConfigError, match="codec must be an EncryptedCodec"):
        Queue("q", codec="aes")  # type: ignore[arg-type]  # the point of the test


@pytest.mark.slow
async def test_the_command_line_reads_and_writes_with_the_keys(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    async with Queue("q", url=server.url, codec=CODECS[1]) as queue:

        @queue.task(attempts=1)
        async def fail(text: str) -> None:
            raise ValueError("boom")

        waiting = await fail.add(SECRET)
        done = await asyncio.to_thread(invoke, "job", "show", waiting.id)
        assert "encrypted with key k, " in done.out
        assert SECRET not in done.out
        monkeypatch.setenv("TAMPU_CODEC", "encrypted")
        monkeypatch.setenv("TAMPU_CODEC_KEYS", f"k:{base64.b64encode(KEY).decode()}")
        shown = await asyncio.to_thread(invoke, "job", "show", waiting.id, "--json")
        assert shown.json["payload"] == {"text": SECRET}
        assert (await asyncio.to_thread(invoke, "add", "q", "fail", json.dumps({"text": SECRET}))).code == 0
        assert SECRET.encode() not in stored(server)
        async with Worker(queue, max_attempts=1):
            await until(lambda: server.client().xlen(queue.keys.dlq) == 2, "both have failed")
        letters = (await asyncio.to_thread(invoke, "dlq", "peek", "q", "--json")).json
        assert [letter["payload"] for letter in letters] == [{"text": SECRET}] * 2


async def test_on_failure_gets_the_opened_arguments(server: Server) -> None:
    failed: list[FailedJob] = []
    async with Queue("q", url=server.url, codec=CODECS[1]) as queue:

        @queue.task(attempts=1, on_failure=failed.append)
        async def fail(text: str) -> None:
            raise ValueError("boom")

        async with Worker(queue):
            await fail.add(SECRET)
            await until(lambda: failed, "on_failure was called")
    assert failed[0].arguments == {"text": SECRET}
