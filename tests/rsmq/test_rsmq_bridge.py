"""The bridge from RSMQ to a tampu queue: at-least-once delivery without duplicate ids."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from support.waiting import until
from tampu.cli.commands.rsmq import TampuInlet
from tampu.cli.main import app
from tampu.config import ProducerConfig
from tampu.errors import ConfigError, RedisError
from tampu.produce.producer import Producer
from tampu.rsmq import Rsmq, RsmqOptions, RsmqSync
from tampu.rsmq.bridge import Bridge
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server
    from tampu.wire.job import Job


class Inlet:
    """Accepts messages, or does what the test sets."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bytes]] = []
        self.errors: dict[bytes, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def add(self, message_id: str, body: bytes) -> None:
        await self.gate.wait()
        if error := self.errors.pop(body, None):
            raise error
        self.taken.append((message_id, body))


@pytest.fixture
async def producer(server: Server) -> AsyncIterator[Producer[Any]]:
    async with Producer.connect(server.url, ProducerConfig(queue_name="emails")) as producer:
        yield producer


def jobs(server: Server, queue_name: str = "emails") -> list[Job[Any]]:
    entries = server.client().xrange(f"{{chasqui:{queue_name}}}:stream")
    return [decode_job(fields[b"d"], fields.get(b"n", b"").decode()) for _, fields in entries]


async def test_messages_become_jobs_with_their_ids(rsmq: Rsmq, server: Server, producer: Producer[Any]) -> None:
    await rsmq.create_queue("mail")
    ids = await rsmq.send_messages("mail", ["hé", '{"n": 1}', b"\xff"])
    assert await Bridge(rsmq, "mail", TampuInlet(producer, "send")).drain() == 3
    found = jobs(server)
    assert [job.id for job in found] == ids
    assert [job.name for job in found] == ["send"] * 3
    assert [job.payload for job in found] == ["hé", '{"n": 1}', b"\xff"]
    assert (await rsmq.get_queue_attributes("mail")).msgs == 0


async def test_bodies_may_be_decoded_and_undecodable_ones_stay_bytes(
    rsmq: Rsmq, server: Server, producer: Producer[Any]
) -> None:
    await rsmq.create_queue("mail")
    await rsmq.send_messages("mail", ['{"n": 1}', "no json", b"\xff"])
    await Bridge(rsmq, "mail", TampuInlet(producer, decode="json")).drain()
    assert [job.payload for job in jobs(server)] == [{"n": 1}, "no json", b"\xff"]
    await rsmq.send_message("mail", "x")
    await Bridge(rsmq, "mail", TampuInlet(producer, decode="bytes")).drain()
    assert jobs(server)[-1].payload == b"x"


@pytest.mark.slow
async def test_a_message_that_is_moved_again_is_not_added_again(
    rsmq: Rsmq, server: Server, producer: Producer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bridge dies after the job was added and before the message was deleted."""
    await rsmq.create_queue("mail")
    (message_id,) = await rsmq.send_messages("mail", ["x"])

    async def die(qname: str, ids: Any) -> int:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(rsmq, "delete_messages", die)
        with pytest.raises(ZeroDivisionError):
            await Bridge(rsmq, "mail", TampuInlet(producer), vt_secs=1).drain()
    assert [job.id for job in jobs(server)] == [message_id]

    bridge = Bridge(rsmq, "mail", TampuInlet(producer))
    running = asyncio.create_task(bridge.run())
    await until(lambda: bridge.moved == 1, "it comes again and is moved")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [job.id for job in jobs(server)] == [message_id]
    assert (await rsmq.get_queue_attributes("mail")).msgs == 0


async def test_a_message_is_deleted_only_after_the_inlet_accepted_it(rsmq: Rsmq) -> None:
    await rsmq.create_queue("mail")
    await rsmq.send_message("mail", "x")
    inlet = Inlet()
    inlet.gate.clear()
    running = asyncio.create_task(Bridge(rsmq, "mail", inlet).run())

    async def is_hidden() -> bool:
        return (await rsmq.get_queue_attributes("mail")).visiblemsgs == 0

    await until(is_hidden, "it is received")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await rsmq.get_queue_attributes("mail")).msgs == 1
    assert inlet.taken == []


@pytest.mark.slow
async def test_a_message_the_inlet_rejects_is_retried_and_others_are_moved(
    rsmq: Rsmq, caplog: pytest.LogCaptureFixture
) -> None:
    await rsmq.create_queue("mail")
    await rsmq.send_messages("mail", ["a", "b", "c"])
    inlet = Inlet()
    inlet.errors[b"b"] = RedisError("the server is down")
    bridge = Bridge(rsmq, "mail", inlet, vt_secs=1)
    running = asyncio.create_task(bridge.run())
    await until(lambda: bridge.moved == 2, "the neighbours are moved")
    await until(lambda: bridge.moved == 3, "it comes again")
    assert [body for _, body in inlet.taken] == [b"a", b"c", b"b"]
    assert "1 message(s) of RSMQ queue mail could not be moved; retrying after 1 s: the server is down" in caplog.text
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_error_that_does_not_pass_ends_the_bridge_and_keeps_the_message(rsmq: Rsmq) -> None:
    await rsmq.create_queue("mail")
    await rsmq.send_messages("mail", ["a", "b"])
    inlet = Inlet()
    inlet.errors[b"b"] = ConfigError("never")
    with pytest.raises(ConfigError, match="never"):
        await Bridge(rsmq, "mail", inlet).run()
    assert (await rsmq.get_queue_attributes("mail")).msgs == 1


async def test_two_bridges_share_the_work(rsmq: Rsmq, server: Server) -> None:
    await rsmq.create_queue("mail")
    ids = await rsmq.send_messages("mail", [str(number) for number in range(300)])
    inlet = Inlet()
    async with Rsmq(RsmqOptions(url=server.url)) as other:
        bridges = [Bridge(rsmq, "mail", inlet, batch=20), Bridge(other, "mail", inlet, batch=20)]
        moved = await asyncio.gather(*(bridge.drain() for bridge in bridges))
    assert sum(moved) == 300
    assert sorted(message_id for message_id, _ in inlet.taken) == sorted(ids)


def test_the_command_moves_waiting_messages(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    with RsmqSync(server.url) as rsmq:
        rsmq.create_queue("mail")
        ids = rsmq.send_messages("mail", ['{"to": "ada"}', '{"to": "grace"}'])
    arguments = ["bridge", "mail", "emails", "--drain", "--decode", "json", "--name", "send", "--json"]
    result = CliRunner().invoke(app, ["rsmq", *arguments], catch_exceptions=False)
    assert json.loads(result.stdout) == {"moved": 2}
    found = jobs(server)
    assert [(job.id, job.name, job.payload["to"]) for job in found] == [
        (ids[0], "send", "ada"),
        (ids[1], "send", "grace"),
    ]
