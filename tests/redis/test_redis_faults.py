"""The table of server errors, row by row: what a call of the Client does about each. Provoked on real servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import redis

from servers.process import eventually
from support.clients import open_client
from support.peer import Peer
from support.users import acl_user
from support.waiting import until
from tampu.errors import RedisError
from tampu.redis import client as client_module
from tampu.redis.faults import PASSING, REMEDIES, ConnectionLost, Remedy, ServerError, Unreachable, remedy_of
from tampu.redis.scripts import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.cluster import Cluster
    from servers.process import Server
    from tampu.redis.client import Client

#: Much less than the 10 s that a call waits for a temporary error: permanent errors must fail at once.
AT_ONCE_SECS = 4.0
SHOWN: set[str] = set()
WRITE = Script("write", "return redis.call('SET', KEYS[1], ARGV[1])")
KEY = "{chasqui:q}:k"


def shows(kind: str) -> Callable[[Any], Any]:
    """Mark the test of one row of the table."""
    SHOWN.add(kind)
    return lambda test: test


async def refused_at_once(client: Client, *command: str) -> ServerError:
    connections = client.connections_made
    async with asyncio.timeout(AT_ONCE_SECS):
        with pytest.raises(ServerError) as caught:
            await client.call(*command)
    assert client.connections_made <= connections + 1
    assert caught.value.code == "CMQ-001"
    return caught.value


async def meets(client: Client, kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Return a function that returns whether a call has met this error so far."""
    met: list[str] = []
    apply = client.apply_remedy

    async def note(error: RedisError, *rest: Any) -> bool:
        met.append(getattr(error, "kind", type(error).__name__))
        return await apply(error, *rest)

    monkeypatch.setattr(client, "apply_remedy", note)
    return lambda: kind in met


# --- errors that only need time


@shows("LOADING")
async def test_a_server_that_loads_its_data_is_waited_for(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", loading_process_events_interval_bytes=1024, rdbcompression="no")
    admin = server.client()
    for number in range(300):
        admin.set(f"key {number}", "x" * 2000)
    admin.save()
    server.stop()
    server.settings["key-load-delay"] = "50000"  # microseconds a key
    server.launch()
    try:
        eventually(lambda: _is_loading(server), "it is loading")
        async with open_client(server.url, scripts=[WRITE]) as client:
            call = asyncio.ensure_future(client.run(WRITE, [KEY], ["v"]))
            await until(lambda: getattr(client._last_error, "kind", "") == "LOADING", "the client has met LOADING")
            with pytest.raises(Unreachable, match="still reading its data from disk"):
                await client.up(0.05)
            assert not call.done()
            with server._connect() as control:
                control.config_set("key-load-delay", 0)
            assert await call == b"OK"
    finally:
        server.kill()


def _is_loading(server: Server) -> bool:
    with server._connect() as admin, contextlib.suppress(redis.ConnectionError):
        try:
            admin.ping()
        except redis.exceptions.BusyLoadingError:
            return True
    return False


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """Run another client's script that does not end."""
    server.config_set(lua_time_limit=1)

    def hang() -> None:
        with server._connect(socket_timeout=60) as admin, contextlib.suppress(redis.ResponseError):
            admin.eval("while true do end", 0)

    thread = threading.Thread(target=hang)
    thread.start()
    control = server.client()
    try:
        eventually(lambda: _is_busy(control), "the server is busy")
        yield
    finally:
        with contextlib.suppress(redis.ResponseError):
            control.script_kill()
        thread.join()


def _is_busy(admin: redis.Redis) -> bool:
    try:
        admin.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


@shows("BUSY")
async def test_another_clients_endless_script_is_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_client(server.url) as client:
        await client.up()
        has_met = await meets(client, "BUSY", monkeypatch)
        with busy(server):
            call = asyncio.ensure_future(client.call("SET", KEY, "v"))
            await until(has_met, "the call has met BUSY")
            assert not call.done()
        assert await call == b"OK"


async def test_a_fault_that_does_not_pass_in_time_is_the_error(server: Server) -> None:
    async with open_client(server.url) as client:
        await client.up()
        with busy(server), pytest.raises(ServerError, match="BUSY"):
            await client.call("SET", KEY, "v", patience_secs=0.1)
        assert await client.call("SET", KEY, "v") == b"OK"


@shows("MAXCLIENTS")
@pytest.mark.parametrize("kind", ["valkey", "redis62", "redis86"])
@pytest.mark.parametrize("login", ["", "ada:pw@"])
async def test_a_server_with_too_many_clients_is_waited_for(
    fresh_server: Callable[..., Server], kind: str, login: str
) -> None:
    server = fresh_server(kind)
    admin = server.client()
    with acl_user(server, "ada", "pw"):
        admin.config_set("maxclients", 1)  # it keeps the connections it has
        async with open_client(server.url.replace("redis://", f"redis://{login}"), scripts=(WRITE,)) as client:
            with pytest.raises(Unreachable, match="ERR max number of clients reached"):
                await client.call("PING", patience_secs=2)
            call = asyncio.ensure_future(client.call("PING", patience_secs=60))
            await asyncio.sleep(0)
            assert not call.done()
            admin.config_set("maxclients", 100)
            assert await call == b"PONG"


@shows("UNBLOCKED")
async def test_an_unblocked_read_is_sent_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_client(server.url) as client:
        client_id = await client.call("CLIENT", "ID")
        has_met = await meets(client, "UNBLOCKED", monkeypatch)
        call = asyncio.ensure_future(client.call("BLPOP", KEY, 0))
        control = server.client()
        await until(lambda: control.info("clients")["blocked_clients"] == 1, "the read blocks")
        assert control.execute_command("CLIENT", "UNBLOCK", client_id, "ERROR") == 1
        await until(has_met, "the call was unblocked")
        control.rpush(KEY, "v")
        assert await call == [KEY.encode(), b"v"]


# --- errors that need another server


@shows("READONLY")
async def test_a_replica_is_left_until_it_becomes_the_master(fresh_server: Callable[..., Server]) -> None:
    master = fresh_server("redis86")
    replica = fresh_server("redis86", replicaof=master)
    async with open_client(replica.url) as client:
        with pytest.raises(ServerError, match="this is a replica: connect to the master"):
            await client.call("SET", KEY, "v", patience_secs=0.2)
        connections = client.connections_made
        assert connections > 1  # it has located the master again each time
        call = asyncio.ensure_future(client.call("SET", KEY, "v"))
        await until(lambda: client.connections_made > connections, "it looks for the master again")
        replica.client().replicaof("NO", "ONE")
        assert await call == b"OK"


@shows("MASTERDOWN")
async def test_a_replica_without_its_master_is_left_until_it_has_one(fresh_server: Callable[..., Server]) -> None:
    master = fresh_server("redis86")
    master.client().set(KEY, "v")
    replica = fresh_server("redis86", replicaof=master, replica_serve_stale_data="no")
    eventually(lambda: replica.client().get(KEY), "the replica has the data")
    master.kill()
    eventually(lambda: replica.client().info("replication")["master_link_status"] == "down", "the link is down")
    async with open_client(replica.url) as client:
        with pytest.raises(ServerError, match="the replica has lost its master"):
            await client.call("GET", KEY, patience_secs=0.2)
        connections = client.connections_made
        assert connections > 1
        call = asyncio.ensure_future(client.call("GET", KEY))
        await until(lambda: client.connections_made > connections, "it looks for the master again")
        replica.client().replicaof("NO", "ONE")
        assert await call == b"v"


@shows("MOVED")
@pytest.mark.servers("cluster86")
async def test_moved_names_the_server_to_go_to(server: Cluster) -> None:
    home = server.node_of(KEY)
    stranger = next(node for node in server.nodes if node is not home)
    async with open_client(stranger.url, scripts=[WRITE]) as client:
        assert await client.run(WRITE, [KEY], ["v"]) == b"OK"
        assert client.connections_made == 2
    assert server.client().get(KEY) == b"v"


@shows("CLUSTERDOWN")
@pytest.mark.servers("cluster86")
async def test_a_slot_without_a_node_is_waited_for(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    home = server.node_of(KEY)
    slot = home.client().execute_command("CLUSTER KEYSLOT", KEY)
    async with open_client(home.url) as client:
        await client.up()
        has_met = await meets(client, "CLUSTERDOWN", monkeypatch)
        home.client().execute_command("CLUSTER DELSLOTS", slot)
        try:
            call = asyncio.ensure_future(client.call("SET", KEY, "v"))
            await until(has_met, "the call has met CLUSTERDOWN")
            assert not call.done()
        finally:
            home.client().execute_command("CLUSTER ADDSLOTS", slot)
        assert await call == b"OK"


@contextlib.contextmanager
def migrating(cluster: Cluster, key: str) -> Iterator[tuple[Server, Server]]:
    """Migrate the slot of `key` to another node, and cancel the migration at the end."""
    home = cluster.node_of(key)
    target = next(node for node in cluster.nodes if node is not home)
    slot = home.client().execute_command("CLUSTER KEYSLOT", key)
    home_id, target_id = (node.client().execute_command("CLUSTER MYID").decode() for node in (home, target))
    target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", home_id)
    home.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
    try:
        yield home, target
    finally:
        for node in (home, target):
            node.client().execute_command("CLUSTER SETSLOT", slot, "STABLE")


@shows("ASK")
@pytest.mark.servers("cluster86")
async def test_an_ask_redirect_is_followed(server: Cluster) -> None:
    with migrating(server, KEY) as (home, target):
        async with open_client(server.url, scripts=[WRITE]) as client:
            await client.up()
            # The target node has not loaded the script.
            assert await client.run(WRITE, [KEY], ["v"]) == b"OK"
            assert await client.call("GET", KEY) == b"v"
            assert client.connections_made == 1
        assert target.client().dbsize() == 1
        assert home.client().dbsize() == 0


@shows("TRYAGAIN")
@pytest.mark.servers("cluster86")
async def test_keys_on_two_nodes_are_waited_for(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = KEY, "{chasqui:q}:j"
    server.client().set(here, "v")
    with migrating(server, KEY):
        async with open_client(server.url) as client:
            await client.up()
            has_met = await meets(client, "TRYAGAIN", monkeypatch)
            call = asyncio.ensure_future(client.call("MGET", here, there))
            await until(has_met, "the call has met TRYAGAIN")
            assert not call.done()
            slot = server.node_of(KEY).client().execute_command("CLUSTER KEYSLOT", KEY)
            server.node_of(KEY).client().execute_command("CLUSTER SETSLOT", slot, "STABLE")
            assert await call == [b"v", None]


# --- errors that need a new connection, or the scripts


@shows("NOAUTH")
async def test_a_login_that_is_gone_is_made_again(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", requirepass="pw")
    async with open_client(server.url) as client:
        await client.call("RESET")  # logs out
        assert await client.call("PING") == b"PONG"
        assert client.connections_made == 2


@shows("NOSCRIPT")
@pytest.mark.servers
async def test_flushed_scripts_are_loaded_again(server: Server | Cluster) -> None:
    nodes = server.nodes if hasattr(server, "nodes") else [server]
    async with open_client(server.url, scripts=[WRITE]) as client:
        for value in ("1", "2"):
            for node in nodes:
                node.client().script_flush()
            assert await client.run(WRITE, [KEY], [value]) == b"OK"
        assert client.connections_made == 1


async def test_scripts_are_loaded_again_even_without_patience(server: Server) -> None:
    async with open_client(server.url, scripts=[WRITE]) as client:
        await client.up()
        server.client().script_flush()
        assert await client.run(WRITE, [KEY], ["v"], patience_secs=0.01) == b"OK"


async def test_losing_the_connection_while_loading_scripts_is_survived(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(server.url, scripts=[WRITE]) as client:
        await client.up()
        server.client().script_flush()
        load_scripts = client.load_scripts

        async def cut_then_load() -> None:
            monkeypatch.setattr(client, "load_scripts", load_scripts)
            assert client.connection is not None
            connection = client.connection
            loading = asyncio.ensure_future(load_scripts())
            await asyncio.sleep(0)
            connection.close()
            await loading

        monkeypatch.setattr(client, "load_scripts", cut_then_load)
        assert await client.run(WRITE, [KEY], ["v"]) == b"OK"


@shows("NOGROUP")
async def test_a_missing_group_is_left_to_the_reader(server: Server) -> None:
    async with open_client(server.url) as client:
        error = await refused_at_once(client, "XREADGROUP", "GROUP", "g", "c", "STREAMS", KEY, ">")
        assert error.remedy is Remedy.MAKE_GROUP


# --- errors without a remedy: raised to the caller, with advice


@shows("OOM")
@pytest.mark.servers
async def test_a_server_without_memory(server: Server | Cluster) -> None:
    async with open_client(server.url) as client:
        await client.up()
        server.config_set(maxmemory=1)
        assert "raise it, or let workers drain the queue" in str(await refused_at_once(client, "SET", KEY, "v"))
        server.config_set(maxmemory=0)
        assert await client.call("SET", KEY, "v") == b"OK"


@shows("MISCONF")
async def test_a_server_that_cannot_save(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    (server.data_dir / "dump.rdb").mkdir()  # the file cannot be put there
    server.config_set(save="3600 1")
    admin = server.client()
    admin.bgsave()
    eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", "saving failed")
    async with open_client(server.url) as client:
        assert "check its disk and its log" in str(await refused_at_once(client, "SET", KEY, "v"))
        server.config_set(save="")
        assert await client.call("SET", KEY, "v") == b"OK"


@shows("NOREPLICAS")
@pytest.mark.servers("valkey", "redis62", "redis70", "redis86")
async def test_a_server_without_enough_replicas(server: Server) -> None:
    async with open_client(server.url) as client:
        server.config_set(min_replicas_to_write=1)
        assert "has fewer replicas than min-replicas-to-write requires" in str(
            await refused_at_once(client, "SET", KEY, "v")
        )
        server.config_set(min_replicas_to_write=0)
        assert await client.call("SET", KEY, "v") == b"OK"


@shows("WRONGPASS")
async def test_a_wrong_password(server: Server) -> None:
    async with open_client(server.url.replace("redis://", "redis://ada:wrong@")) as client:
        assert "wrong user name or password" in str(await refused_at_once(client, "PING"))


@shows("NOPERM")
async def test_a_user_without_permission(server: Server) -> None:
    with acl_user(server, "ada", "pw", "~*", "+@all", "-set"):
        async with open_client(server.url.replace("redis://", "redis://ada:pw@")) as client:
            error = await refused_at_once(client, "SET", KEY, "v")
            assert error.kind == "NOPERM"
            assert "lacks a permission" in str(error)


@shows("WRONGTYPE")
async def test_a_key_of_another_type(server: Server) -> None:
    server.client().lpush(KEY, "x")
    async with open_client(server.url) as client:
        assert (await refused_at_once(client, "GET", KEY)).kind == "WRONGTYPE"


async def test_an_unknown_error_is_not_retried() -> None:
    async with Peer(lambda command: b"-WEIRD things happen\r\n") as peer, open_client(peer.url) as client:
        error = await refused_at_once(client, "PING")
        assert (error.kind, error.remedy) == ("WEIRD", Remedy.NONE)
        assert len(peer.commands) == 1


# --- the table


def test_every_row_of_the_table_is_shown_above() -> None:
    assert set(REMEDIES) == SHOWN


def test_every_known_server_error_is_in_the_table() -> None:
    known = """NOSCRIPT, NOGROUP, LOADING, READONLY, OOM, MOVED, ASK, TRYAGAIN, CLUSTERDOWN, MASTERDOWN, MISCONF,
        NOREPLICAS, BUSY, UNBLOCKED, NOAUTH, WRONGPASS, NOPERM"""
    assert {kind.strip() for kind in known.split(",")} <= set(REMEDIES)


def test_passing_errors_have_no_remedy() -> None:
    assert all(REMEDIES[kind] is Remedy.NONE for kind in PASSING)


def test_only_errors_of_a_server_have_a_remedy() -> None:
    assert remedy_of(ConnectionLost("x")) is Remedy.RECONNECT
    assert remedy_of(Unreachable("x")) is Remedy.RECONNECT
    assert remedy_of(ServerError("LOADING x")) is Remedy.WAIT
    assert remedy_of(ValueError("x")) is Remedy.NONE
    assert remedy_of(RedisError("x")) is Remedy.NONE


def test_backoff_doubles_up_to_a_limit_with_jitter() -> None:
    first, last = client_module.FIRST_BACKOFF_SECS, client_module.LAST_BACKOFF_SECS
    assert client_module.backoff_secs(0) == 0
    for attempt in (1, 2, 3, 10, 1000):
        full = min(first * 2 ** (attempt - 1), last)
        waits = {client_module.backoff_secs(attempt) for _ in range(50)}
        assert all(full / 2 <= wait <= full for wait in waits)
        assert len(waits) > 1
