"""Finding the server: sentinels, Cluster slots, and bulk adds during failovers and slot migrations."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.clients import open_client
from support.parts import consuming
from support.producers import chain_of, open_producer, use_small_windows
from support.proxy import Proxy
from support.queues import QueueView
from support.waiting import until
from tampu.errors import RedisError
from tampu.redis import client as client_module
from tampu.redis import discovery
from tampu.redis.discovery import locate, slot_of
from tampu.redis.faults import ServerError, Unreachable
from tampu.redis.settings import Address, parse_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from servers.cluster import Cluster
    from servers.process import Server
    from servers.sentinel import SentinelSetup
    from tampu.wire.job import Job

KEYS = QueueKeys("q")


# --- sentinels


async def test_a_sentinel_url_follows_the_master_after_a_failover(
    fresh_sentinel: Callable[..., SentinelSetup],
) -> None:
    setup = fresh_sentinel()
    async with open_producer(setup.url, retry_for_secs=30) as producer:
        before = await producer.add_bulk(range(1000))
        replica = QueueView(setup.replica, "q")
        await until(lambda: replica.length() == 1000, "the replica has them all")
        setup.master.kill()
        during = [await producer.add("during the failover")]
        after = await producer.add_bulk(range(1000))
        assert QueueView(setup.replica, "q").ids() == before + during + after
        assert chain_of(producer).windows_lost_by_server == 0


async def test_windows_lost_in_a_failover_are_logged_and_adds_continue(
    fresh_sentinel: Callable[..., SentinelSetup], caplog: pytest.LogCaptureFixture
) -> None:
    setup = fresh_sentinel()
    async with open_producer(setup.url, retry_for_secs=30) as producer:
        kept = await producer.add_bulk(range(300))  # two windows
        replica = QueueView(setup.replica, "q")
        await until(lambda: replica.length() == 300, "the replica has them all")
        setup.replica.pause()
        setup.master.client().execute_command("CLIENT", "KILL", "TYPE", "replica")  # from now on it gets nothing
        lost = await producer.add_bulk(range(600))  # three windows, confirmed by the master alone
        setup.master.kill()
        setup.replica.resume()
        with caplog.at_level(logging.WARNING, "tampu.producer"):
            after = [await producer.add("after"), *(await producer.add_bulk(range(300)))]
        found = QueueView(setup.replica, "q").ids()
        assert found == kept + after
        assert not set(lost) & set(found)
        assert chain_of(producer).windows_lost_by_server == 3
        assert "forgot 3 confirmed windows" in caplog.text


async def test_a_master_the_sentinels_do_not_know_is_an_error_that_names_it(
    fresh_sentinel: Callable[..., SentinelSetup],
) -> None:
    setup = fresh_sentinel()
    url = setup.url.replace(setup.name, "no-such-master")
    async with open_client(url) as client:
        with pytest.raises(Unreachable, match="knows a master named 'no-such-master'"):
            await client.up(0.2)
    # A sentinel that is down is skipped.
    url = setup.url.replace("redis+sentinel://", "redis+sentinel://127.0.0.1:1,")
    async with open_client(url) as client:
        assert await client.call("PING") == b"PONG"


async def test_sentinels_have_their_own_credentials(fresh_sentinel: Callable[..., SentinelSetup]) -> None:
    setup = fresh_sentinel()
    sentinel = setup.sentinels[0].client()
    sentinel.execute_command("ACL", "SETUSER", "watcher", "on", ">pw", "~*", "&*", "+@all")
    sentinel.execute_command("ACL", "SETUSER", "default", "off")
    async with open_client(f"{setup.url}?sentinel_username=watcher&sentinel_password=pw") as client:
        assert await client.call("PING") == b"PONG"
    async with open_client(setup.url) as client:
        with pytest.raises(Unreachable, match="knows a master named"):
            await client.up(0.3)


async def test_a_replica_that_sentinels_still_call_master_is_not_used(
    fresh_sentinel: Callable[..., SentinelSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = fresh_sentinel()
    replica = parse_url(setup.replica.url).addresses[0]
    master = parse_url(setup.master.url).addresses[0]
    answers = [replica, replica, master]

    async def out_of_date(*_: object) -> object:
        return answers.pop(0)

    monkeypatch.setattr(client_module, "locate", out_of_date)
    async with open_client(setup.url) as client:
        assert (await client.call("ROLE"))[0] == b"master"
    assert answers == []


# --- the Cluster


@pytest.mark.servers("cluster86")
async def test_each_queue_is_found_on_the_node_of_its_slot(server: Cluster) -> None:
    homes = set()
    for number in range(12):
        keys = QueueKeys(f"queue {number}")
        async with open_producer(server.url, queue_name=f"queue {number}") as producer:
            job_id = await producer.add(number)
            assert producer.client.connections_made == 1  # found at once, without MOVED
        home = server.node_of(keys.stream)
        homes.add(home.port)
        assert home.client().xlen(keys.stream) == 1
        assert QueueView(server, f"queue {number}").ids() == [job_id]
    assert len(homes) == 3


@pytest.mark.servers("cluster86")
async def test_a_cluster_is_found_while_one_node_of_the_url_is_up(server: Cluster) -> None:
    url = server.url.replace("redis+cluster://", "redis+cluster://127.0.0.1:1,")
    address = await locate(parse_url(url), KEYS.tag.encode())
    assert address.port == server.node_of(KEYS.stream).port


async def test_a_cluster_without_reachable_nodes_is_unreachable() -> None:
    async with open_client("redis+cluster://127.0.0.1:1,127.0.0.1:2") as client:
        with pytest.raises(Unreachable, match=r"no Cluster node at 127\.0\.0\.1:1, 127\.0\.0\.1:2 returned the slots"):
            await client.up(0.3)


class Migration:
    """Migrates the slot of the queue to another node, step by step."""

    def __init__(self, cluster: Cluster) -> None:
        self.home = cluster.node_of(KEYS.stream)
        self.target = next(node for node in cluster.nodes if node is not self.home)
        self.others = [node for node in cluster.nodes if node is not self.home and node is not self.target]
        self.slot = self.home.client().execute_command("CLUSTER KEYSLOT", KEYS.stream)
        self.home_id = self._id(self.home)
        self.target_id = self._id(self.target)

    @staticmethod
    def _id(node: Server) -> str:
        return node.client().execute_command("CLUSTER MYID").decode()

    def begin(self) -> None:
        self.target.client().execute_command("CLUSTER SETSLOT", self.slot, "IMPORTING", self.home_id)
        self.home.client().execute_command("CLUSTER SETSLOT", self.slot, "MIGRATING", self.target_id)

    def move(self, *keys: str) -> None:
        self.home.client().execute_command("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)

    def move_the_rest(self) -> None:
        while keys := self.home.client().execute_command("CLUSTER GETKEYSINSLOT", self.slot, 100):
            self.move(*keys)

    def finish(self) -> None:
        for node in (self.target, self.home, *self.others):
            node.client().execute_command("CLUSTER SETSLOT", self.slot, "NODE", self.target_id)


async def test_a_slot_migration_during_a_bulk_add_loses_and_repeats_nothing(
    fresh_server: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.02)
    use_small_windows(monkeypatch, 16)
    cluster = fresh_server("cluster86")
    migration = Migration(cluster)
    done = asyncio.Event()
    given = 0

    async def jobs() -> AsyncIterator[int]:
        nonlocal given
        last = None
        while last is None or given < last:
            yield given
            given += 1
            if given % 16 == 0:
                await asyncio.sleep(0)
            if done.is_set() and last is None:
                last = given + 1000

    async with open_producer(cluster.url, retry_for_secs=30) as producer:
        home = QueueView(cluster, "q")
        bulk = asyncio.ensure_future(producer.add_bulk(jobs()))
        await until(lambda: given > 500, "the bulk add has started")
        migration.begin()
        so_far = given
        await until(lambda: given > so_far + 500, "the node still serves keys that are there")
        migration.move(KEYS.stream)
        await until(lambda: home.errors_given()["TRYAGAIN"], "a window got TRYAGAIN")
        migration.move_the_rest()
        await until(lambda: home.errors_given()["ASK"], "a window got ASK")
        assert not home.errors_given()["MOVED"]
        migration.finish()
        await until(lambda: home.errors_given()["MOVED"], "a window got MOVED")
        done.set()
        ids = await bulk
        assert len(ids) == given == len(set(ids))
        assert QueueView(cluster, "q").ids() == ids
        assert migration.target.client().xlen(KEYS.stream) == given
        assert chain_of(producer).windows_lost_by_server == 0


async def test_adds_reads_and_settles_follow_ask_redirects(
    fresh_server: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_windows(monkeypatch, 16)
    cluster = fresh_server("cluster86")
    migration = Migration(cluster)
    done: list[Any] = []

    async def handler(job: Job[Any]) -> None:
        done.append(job.payload)

    def unsettled() -> int:
        asking = migration.target.client().pipeline(transaction=False)
        return int(asking.execute_command("ASKING").execute_command("XLEN", KEYS.stream).execute()[1])

    async with open_producer(cluster.url) as producer:
        await producer.add("before")
        async with consuming(cluster.url, handler, queue_name="q", events_enabled=False, block_ms=50):
            await until(lambda: done == ["before"], "the worker runs")
            migration.begin()
            migration.move_the_rest()
            async with asyncio.timeout(5):
                await producer.add("during")
                await producer.add_bulk(range(200))
            await until(lambda: done == ["before", "during", *range(200)], "they are read from the target")
            await until(lambda: not unsettled(), "they are settled")
            migration.finish()
            await producer.add("after")
            await until(lambda: done[-1] == "after", "the worker continues on the target")
    assert len(done) == 203


async def test_a_killed_cluster_master_is_replaced_by_its_replica(fresh_server: Callable[..., Cluster]) -> None:
    cluster = fresh_server("cluster86", replicas=1)
    home = cluster.node_of(KEYS.stream)
    # The URL names only the node that is killed: the others must have been learned before.
    async with open_producer(f"redis+cluster://127.0.0.1:{home.port}", retry_for_secs=60) as producer:
        before = await producer.add_bulk(range(600))
        replicas = [node for node in cluster.nodes if node.client().info("replication")["role"] == "slave"]
        follower = next(node for node in replicas if node.client().info("replication")["master_port"] == home.port)
        offset = home.client().info("replication")["master_repl_offset"]
        await until(
            lambda: follower.client().info("replication")["slave_repl_offset"] >= offset, "the replica has them all"
        )
        home.kill()
        after = await producer.add_bulk(range(600))
        found = follower.client().xrange(KEYS.stream)
        assert len(found) == 1200
        assert len(set(before + after)) == 1200


# --- queries


async def test_queries_use_tls_and_the_password(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True, requirepass="pw")
    settings = parse_url(server.url)
    assert await discovery._ask(settings, settings.addresses[0], "PING") == b"PONG"
    wrong = replace(settings, password="secret")
    with pytest.raises(ServerError, match="WRONGPASS") as raised:
        await discovery._ask(wrong, wrong.addresses[0], "PING")
    assert "secret" not in str(raised.value)


async def test_queries_use_the_credentials_of_a_callback(server: Server) -> None:
    server.client().execute_command("ACL", "SETUSER", "ada", "on", ">pw", "~*", "+@all")
    settings = parse_url(server.url, credential_provider=lambda where: ("ada", "pw"))
    assert await discovery._ask(settings, settings.addresses[0], "ACL", "WHOAMI") == b"ada"
    server.client().execute_command("ACL", "DELUSER", "ada")


@pytest.mark.servers("cluster86")
@pytest.mark.parametrize("key", ["q", "{chasqui:q}:stream", "{}q", "a{b", "{{a}b}", "é{x}{y}"])
def test_slots_are_those_of_the_server(server: Cluster, key: str) -> None:
    assert slot_of(key.encode()) == server.nodes[0].client().execute_command("CLUSTER KEYSLOT", key)


def answer_slots_slowly(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace the query of a Cluster; return the queries that have begun."""
    asked: list[object] = []

    async def answer(settings: object) -> list[tuple[int, int, Address]]:
        asked.append(settings)
        await asyncio.sleep(0)
        return [(0, 16383, Address("127.0.0.1", 1))]

    monkeypatch.setattr(discovery, "_ask_for_slots", answer)
    return asked


async def test_clients_that_connect_together_share_one_cluster_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_slots_slowly(monkeypatch)
    settings = parse_url("redis+cluster://127.0.0.1:1")
    cancelled = asyncio.ensure_future(discovery.ask_cluster(settings, b"a"))
    others = [asyncio.ensure_future(discovery.ask_cluster(settings, b"b")) for _ in range(3)]
    await until(lambda: asked, "the query has begun")
    cancelled.cancel()  # it does not end the query of the others
    assert await asyncio.gather(*others) == [Address("127.0.0.1", 1)] * 3
    assert len(asked) == 1


def test_the_queries_of_closed_event_loops_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_slots_slowly(monkeypatch)
    settings = parse_url("redis+cluster://127.0.0.1:1")
    for _ in range(3):
        asyncio.run(discovery.ask_cluster(settings, b"q"))
    assert sum(loop.is_closed() for loop, _ in discovery._queries) == 1  # the last one


async def test_the_address_of_a_single_server_is_that_of_the_url(server: Server) -> None:
    async with Proxy(server.address) as proxy:
        assert (await locate(parse_url(proxy.url), b"x")).port == proxy.port


async def test_an_unknown_host_is_an_error_with_its_name() -> None:
    async with open_client("redis://no-such-host.invalid") as client:
        with pytest.raises(RedisError, match=r"no-such-host\.invalid"):
            await client.up(0.5)
