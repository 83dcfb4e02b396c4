"""Faults of real servers: a clear error with its code, or a wait until the fault is over; then adds work again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest
import redis

from servers.process import eventually
from support.producers import chain_of, open_producer, unopened_producer, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from support.users import acl_user
from support.waiting import until
from tampu.config import ProducerConfig
from tampu.errors import OutcomeUnknownError, RedisError
from tampu.produce.producer import Producer
from tampu.redis.faults import ServerError, Unreachable
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.cluster import Cluster
    from servers.process import Server

#: Much less than the 10 s for which a transient fault is retried.
AT_ONCE_SECS = 4.0


async def all_refused(producer: Producer[Any], kind: str, advice: str) -> None:
    """Check that every form of add raises this error and adds nothing."""
    calls: list[Callable[[], Any]] = [
        lambda: producer.add(1),
        lambda: producer.add_with_id("x", 1),
        lambda: producer.add_in(60, 1),
        lambda: producer.add_in_with_id("y", 60, 1),
        lambda: producer.add_bulk(range(600)),
        lambda: producer.add_bulk(iter(range(600))),
        lambda: producer.add_in_bulk(60, range(300)),
    ]
    for call in calls:
        async with asyncio.timeout(AT_ONCE_SECS):
            with pytest.raises(RedisError, match=kind) as caught:
                await call()
        assert caught.value.code == "CMQ-001"
        assert advice in str(caught.value)
        assert list(caught.value.accepted) == []
        assert not isinstance(caught.value, OutcomeUnknownError)


async def all_well(producer: Producer[Any], view: QueueView) -> None:
    assert view.length() == 0
    assert view.delayed() == []
    assert (await producer.add_with_id("x", 1)).is_new  # no marker was left
    assert (await producer.add_in_with_id("y", 60, 1)).is_new
    ids = await producer.add_bulk(range(600))
    assert view.ids() == ["x", *ids]
    assert view.delayed_ids() == ["y"]


# --- unreachable or forbidden


@pytest.mark.slow
async def test_an_unreachable_server(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match="cannot connect to 127") as caught:
            await Producer.connect(url, ProducerConfig(retry_for_secs=1))
    assert caught.value.code == "CMQ-001"


async def test_a_server_that_comes_up_late_is_waited_for(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    server.stop()
    async with Proxy(server.address) as proxy:
        producer = unopened_producer(proxy.url)
        adds = [asyncio.ensure_future(producer.add(number)) for number in range(5)]
        await until(lambda: proxy.links and proxy.link.is_cut, "an attempt has failed")
        server.start()
        ids = await asyncio.gather(*adds)
        assert QueueView(server, "q").ids() == ids
        await producer.close()


async def test_a_wrong_password(server: Server) -> None:
    with acl_user(server, "ada", "pw"):
        vault = ["wrong"]
        async with asyncio.timeout(AT_ONCE_SECS):
            with pytest.raises(ServerError, match="wrong user name or password") as caught:
                await Producer.connect(server.url.replace("redis://", "redis://ada:wrong@"))
        assert caught.value.code == "CMQ-001"
        settings = parse_url(server.url, credential_provider=lambda where: ("ada", vault[0]))
        producer: Producer[Any] = Producer(settings, ProducerConfig(queue_name="q"))
        async with asyncio.timeout(AT_ONCE_SECS):
            for call in (producer.add(1), producer.add_bulk(range(3)), producer.get_result("x"), producer.peek_dlq()):
                with pytest.raises(ServerError, match="WRONGPASS"):
                    await call
        vault[0] = "pw"
        job_id = await producer.add(2)
        assert QueueView(server, "q").ids() == [job_id]
        await producer.close()


async def test_a_user_without_the_permission_to_run_scripts(server: Server) -> None:
    with acl_user(server, "ada", "pw"):
        async with open_producer(server.url.replace("redis://", "redis://ada:pw@")) as producer:
            await producer.add("before")
            server.client().execute_command("ACL", "SETUSER", "ada", "-evalsha")
            with pytest.raises(ServerError, match="lacks a permission") as caught:
                await producer.add("refused")
            assert caught.value.kind == "NOPERM"
            with pytest.raises(ServerError, match="NOPERM"):
                await producer.add_bulk(range(1000))
            server.client().execute_command("ACL", "SETUSER", "ada", "+evalsha")
            await producer.add("after")
            assert QueueView(server, "q").payloads() == ["before", "after"]


async def test_a_user_without_access_to_the_queues_keys(server: Server) -> None:
    with acl_user(server, "ada", "pw", "~{chasqui:other}*", "+@all"):
        async with open_producer(server.url.replace("redis://", "redis://ada:pw@")) as producer:
            with pytest.raises(RedisError, match="NOPERM"):
                await producer.add("refused")
    assert server.client().dbsize() == 0


async def test_a_user_needs_only_the_queues_keys_and_commands(server: Server) -> None:
    commands = """+@stream +@hash +@string +@sortedset +@keyspace +@scripting +time +ping +client|setname -@dangerous"""
    with acl_user(server, "ada", "pw", "~{chasqui:q}*", *commands.split()):
        async with open_producer(server.url.replace("redis://", "redis://ada:pw@")) as producer:
            await producer.add_with_id("x", 1)
            await producer.add_in(60, 1)
            await producer.add_bulk(range(300))
            assert await producer.peek_dlq() == []


@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_window_without_permission_to_add_leaves_no_trace(server: Server) -> None:
    """Its number is taken before its first job is added, and must be released if that job is refused."""
    with acl_user(server, "ada", "pw"):
        async with open_producer(server.url.replace("redis://", "redis://ada:pw@")) as producer:
            client = server.client()
            client.execute_command("ACL", "SETUSER", "ada", "-xadd")
            for jobs in (["lone"], ["first", "second"]):
                with pytest.raises(RedisError, match=r"permission|can.t run this command"):
                    await producer.add_bulk(jobs)
            assert [client.hgetall(key) for key in client.keys("*")] == [{b"last": b"1"}]  # that of the opening
            client.execute_command("ACL", "SETUSER", "ada", "+xadd")
            ids = [await producer.add("after"), *await producer.add_bulk(["and", "on"])]
    assert QueueView(server, "q").ids() == ids


# --- full, read-only, busy


@pytest.mark.servers
async def test_a_server_without_memory(server: Server | Cluster) -> None:
    async with open_producer(server.url) as producer:
        server.config_set(maxmemory=1)
        await all_refused(producer, "OOM", "let workers drain the queue")
        server.config_set(maxmemory=0)
        await all_well(producer, QueueView(server, "q"))


@pytest.mark.servers("redis86")
async def test_a_server_without_memory_with_trim(server: Server) -> None:
    async with open_producer(server.url, overflow="trim") as producer:
        server.config_set(maxmemory=1)
        await all_refused(producer, "OOM", "let workers drain the queue")
        server.config_set(maxmemory=0)
        await all_well(producer, QueueView(server, "q"))


async def test_memory_that_runs_out_in_the_middle_of_a_bulk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch, 10)
    async with open_producer(server.url) as producer:

        def payloads() -> Iterator[int]:
            for number in range(1000):
                if number == 500:
                    server.config_set(maxmemory=1)
                yield number

        with pytest.raises(ServerError, match="OOM") as caught:
            await producer.add_bulk(payloads())
        view = QueueView(server, "q")
        assert list(caught.value.accepted) == view.ids()
        assert view.payloads() == list(range(view.length()))
        assert 400 < view.length() <= 500
        server.config_set(maxmemory=0)
        after = await producer.add("after")
        assert view.ids()[-1] == after


@pytest.mark.servers("valkey", "redis70", "redis86")  # Redis 6.2 does not check it inside a script
async def test_a_server_that_requires_replicas(server: Server) -> None:
    async with open_producer(server.url) as producer:
        server.config_set(min_replicas_to_write=1)
        await all_refused(producer, "NOREPLICAS", "has fewer replicas than min-replicas-to-write requires")
        server.config_set(min_replicas_to_write=0)
        await all_well(producer, QueueView(server, "q"))


async def test_a_server_that_cannot_save(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    (server.data_dir / "dump.rdb").mkdir()  # the file cannot be written there
    server.config_set(save="3600 1")
    client = server.client()
    client.bgsave()
    eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "saving failed")
    async with open_producer(server.url) as producer:
        await all_refused(producer, "MISCONF", "check its disk and its log")
        server.config_set(save="")
        await all_well(producer, QueueView(server, "q"))


@pytest.mark.parametrize("kind", ["valkey", "redis62", "redis86"])
async def test_a_replica_is_an_error_until_it_is_the_master(fresh_server: Callable[..., Server], kind: str) -> None:
    master = fresh_server(kind)
    replica = fresh_server(kind, replicaof=master)
    eventually(lambda: replica.client().info("replication")["master_link_status"] == "up", "they are in sync")
    async with open_producer(replica.url, retry_for_secs=1) as producer:
        with pytest.raises(RedisError, match="this is a replica: connect to the master") as caught:
            await producer.add("refused")
        assert caught.value.code == "CMQ-001"
    async with (
        Proxy(replica.address) as proxy,
        open_producer(proxy.url, retry_for_secs=30) as producer,
    ):
        adds = [asyncio.ensure_future(producer.add(number)) for number in range(3)]
        adds += [asyncio.ensure_future(producer.add_with_id(f"id {number}", number)) for number in range(3)]
        await until(
            lambda: sum(link.commands.count(b"EVALSHA") for link in proxy.links) >= 4,
            "several windows have met the replica and are sent again",
        )
        assert not any(add.done() for add in adds)
        replica.client().replicaof("NO", "ONE")
        ids = await asyncio.gather(*adds)
        assert QueueView(replica, "q").ids() == ids


async def test_a_server_that_loads_its_data_is_waited_for(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", loading_process_events_interval_bytes=1024, rdbcompression="no")
    client = server.client()
    for number in range(300):
        client.set(f"key {number}", "x" * 2000)
    async with open_producer(server.url) as producer:
        before = await producer.add("before")
        client.save()
        server.stop()
        server.settings["key-load-delay"] = "50000"  # microseconds per key
        server.launch()
        try:
            adds = [asyncio.ensure_future(producer.add(number)) for number in range(5)]
            view = QueueView(server, "q")

            def has_met_loading() -> bool:
                with contextlib.suppress(redis.ConnectionError):  # until it listens
                    return view.errors_given()["LOADING"] > 0
                return False

            await until(has_met_loading, "it has met LOADING")
            assert not any(add.done() for add in adds)
            view.client.config_set("key-load-delay", 0)
            ids = await asyncio.gather(*adds)
            assert QueueView(server, "q").ids() == [before, *ids]
        finally:
            with contextlib.suppress(redis.ConnectionError):
                server.client().config_set("key-load-delay", 0)


# --- killed


@pytest.mark.parametrize("kind", ["valkey", "redis62", "redis70", "redis86"])
async def test_a_server_killed_and_restarted_in_the_middle_of_a_bulk(
    fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_small_windows(monkeypatch, 20)
    server = fresh_server(kind, appendonly="yes", appendfsync="always")
    async with open_producer(server.url, retry_for_secs=30) as producer:
        ids: list[str] = []

        async def payloads() -> Any:
            for number in range(3000):
                if number in (500, 1500, 2500):
                    server.kill()
                    await asyncio.to_thread(server.start)
                yield number

        bulk = asyncio.ensure_future(producer.add_bulk(payloads()))
        singles = [asyncio.ensure_future(producer.add_with_id(f"single {number}", number)) for number in range(10)]
        ids = await bulk
        assert all(job_id.is_new for job_id in await asyncio.gather(*singles))
        view = QueueView(server, "q")
        found = view.ids()
        assert [job_id for job_id in found if not job_id.startswith("single")] == ids
        assert sorted(job_id for job_id in found if job_id.startswith("single")) == sorted(
            f"single {number}" for number in range(10)
        )
        assert len(set(found)) == 3010
        assert chain_of(producer).windows_lost_by_server == 0
        assert chain_of(producer).windows_sent_again > 0


async def test_a_server_that_hangs_in_the_middle_of_a_bulk(
    fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 20)
    server = fresh_server()
    async with open_producer(server.url, settings={"response_timeout_secs": 0.1}) as producer:
        given = 0

        async def payloads() -> Any:
            nonlocal given
            for number in range(2000):
                given = number
                if number == 1000:
                    server.pause()
                yield number

        bulk = asyncio.ensure_future(producer.add_bulk(payloads()))
        await until(lambda: producer.client.connection is None, "the silent server is given up")
        server.resume()
        assert QueueView(server, "q").length() <= given + 1
        ids = await bulk
        assert QueueView(server, "q").ids() == ids
        assert QueueView(server, "q").payloads() == list(range(2000))
