"""`embedded://` end to end: the producer starts its server, shares it, keeps its data if asked to, and releases it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from servers.liveness import is_alive
from support.clients import open_client
from support.producers import open_producer
from support.waiting import until
from tampu.config import ProducerConfig
from tampu.embedded import server as embedded
from tampu.embedded.server import EmbeddedLease
from tampu.errors import ConfigError, ShutdownError
from tampu.produce.producer import Producer
from tampu.redis.discovery import locate
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from pathlib import Path

    from tampu.redis.client import Client


async def info(pipe: Client, field: str) -> str:
    text = (await pipe.call("INFO", "server")).decode()
    return next(line.partition(":")[2] for line in text.splitlines() if line.startswith(f"{field}:"))


async def pid_of(producer: Producer[Any]) -> int:
    return int(await info(producer.client, "process_id"))


async def test_the_first_job_runs_with_nothing_installed() -> None:
    async with Producer.connect("embedded://", ProducerConfig(queue_name="first")) as producer:
        job_id = await producer.add({"to": "ada"})
        assert job_id.is_new
        (entry,) = await producer.client.call("XRANGE", producer.stream_key, "-", "+")
        assert job_id.encode() in entry[1][1]


async def test_two_producers_in_one_process_share_one_server() -> None:
    async with open_producer("embedded://") as one, open_producer("embedded://") as other:
        assert await pid_of(one) == await pid_of(other)
        await one.add_with_id("shared", 1)
        assert not (await other.add_with_id("shared", 2)).is_new
        await one.close()
        assert (await other.add(3)).is_new  # the server still runs for the other


async def test_temporary_data_lasts_as_long_as_the_process() -> None:
    async with open_producer("embedded://", queue_name="kept") as producer:
        await producer.add_with_id("once", 1)
        pid = await pid_of(producer)
    async with open_producer("embedded://", queue_name="kept") as producer:
        assert await pid_of(producer) == pid
        assert not (await producer.add_with_id("once", 1)).is_new


async def test_data_in_a_folder_is_kept_and_the_last_user_stops_the_server(tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}/data"
    async with open_producer(url) as one, open_producer(url) as other:
        pid = await pid_of(one)
        assert await pid_of(other) == pid
        await one.add_with_id("kept", 1)
        await one.close()
        assert is_alive(pid)
        await other.close()
    await until(lambda: not is_alive(pid), "the server has ended")
    async with open_producer(url) as producer:
        assert await pid_of(producer) != pid
        assert not (await producer.add_with_id("kept", 1)).is_new


async def test_two_processes_share_the_server_of_a_folder(tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}/data"
    program = textwrap.dedent(f"""
        import asyncio
        from tampu.produce.producer import Producer
        async def main():
            async with Producer.connect({url!r}) as producer:
                print((await producer.add_with_id("shared", 1)).is_new)
        asyncio.run(main())
    """)
    async with open_producer(url, queue_name="default") as producer:
        assert (await producer.add_with_id("shared", 1)).is_new
        other = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert other.stdout == "False\n", other.stderr
        assert await producer.get_result("x") is None  # it still runs after the other process has ended


async def test_a_crashed_server_is_restarted(tmp_path: Path) -> None:
    async with open_producer(f"embedded://{tmp_path}/data") as producer:
        await producer.add_with_id("kept", 1)
        await asyncio.sleep(1.1)  # its file is synced every second
        pid = await pid_of(producer)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid), "it has died")
        assert (await producer.add("after the crash")).is_new
        assert await pid_of(producer) != pid
        assert not (await producer.add_with_id("kept", 1)).is_new
    assert embedded._shared.get((tmp_path / "data").resolve()) is None  # every acquire was released


async def test_the_event_loop_is_not_blocked_while_the_server_starts(tmp_path: Path) -> None:
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.ensure_future(tick())
    async with open_producer(f"embedded://{tmp_path}/data"):
        assert turns > 5
    ticking.cancel()


async def test_a_producer_closed_while_its_server_starts_releases_it(tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}/data"
    producer: Producer[Any] = Producer(parse_url(url))
    opening = asyncio.ensure_future(producer.open())
    await asyncio.sleep(0.01)
    opening.cancel()
    await producer.close()
    assert (tmp_path / "data").resolve() not in embedded._shared
    with pytest.raises(asyncio.CancelledError):
        await opening


async def test_a_released_lease_starts_nothing(tmp_path: Path) -> None:
    lease = EmbeddedLease(str(tmp_path))
    await lease.release()
    with pytest.raises(ShutdownError):
        await lease.running()
    assert not (tmp_path / "server.json").exists()


async def test_locating_an_embedded_server_starts_it() -> None:
    address = await locate(parse_url("embedded://"), b"x")
    async with open_client(f"unix://{address.path}") as pipe:
        assert await pipe.call("PING") == b"PONG"


async def test_a_folder_with_a_path_too_long_for_a_socket_works(tmp_path: Path) -> None:
    async with open_client(f"embedded://{tmp_path}/{'long' * 30}") as pipe:
        assert await pipe.call("PING") == b"PONG"
        assert b"user=default" in await pipe.call("CLIENT", "INFO")


async def test_a_folder_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the folder"):
        await Producer.connect(f"embedded://{tmp_path}/file/data")


async def test_the_database_of_an_embedded_url_is_used() -> None:
    async with open_client("embedded://?db=3") as pipe:
        await pipe.call("SET", "k", "v")
        assert b"db=3" in await pipe.call("CLIENT", "INFO")
