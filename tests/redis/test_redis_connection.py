"""`Connection` and `Client`: order of replies, timeouts, invalid replies, limits, addresses, reconnects."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest
import redis
import uvloop

from servers.process import eventually
from support.clients import open_client
from support.proxy import Proxy
from support.waiting import until
from tampu.errors import ShutdownError
from tampu.redis import client as client_module
from tampu.redis.connection import Connection, pack_command
from tampu.redis.faults import ConnectionLost, Unreachable
from tampu.redis.scripts import Script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers.cluster import Cluster
    from servers.process import Server

ECHO = Script("echo", "return {KEYS[1], ARGV[1]}")


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


def connected(response_timeout_secs: float = 15.0) -> tuple[Connection, FakeTransport]:
    connection = Connection(asyncio.get_running_loop(), response_timeout_secs)
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


# --- one connection


async def test_the_first_request_of_an_iteration_is_sent_at_once() -> None:
    connection, transport = connected()
    replies: list[Any] = []
    for number in range(4):
        connection.request(b"%d" % number, replies.append)
    assert transport.writes == [b"0"]
    await asyncio.sleep(0)
    assert transport.writes == [b"0", b"123"]
    connection.request(b"4", replies.append)
    assert transport.writes == [b"0", b"123", b"4"]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_first_request_arrives_before_the_iteration_ends(run: Callable[..., Any]) -> None:
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: Connection(loop, 15.0), sock=ours)
            connection.request(b"now", lambda reply: None)
            received = theirs.recv(16, socket.MSG_DONTWAIT)
            connection.close()
            return received

    assert run(main()) == b"now"


async def test_replies_match_requests_in_order_however_the_bytes_arrive() -> None:
    connection, _ = connected()
    replies: list[Any] = []
    for _number in range(3):
        connection.request(b"x", replies.append)
    for byte in b"+one\r\n-OOM two\r\n*1\r\n:3\r\n":
        connection.data_received(bytes([byte]))
    assert replies[0] == b"one"
    assert replies[1].kind == "OOM"
    assert replies[2] == [3]


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "invalid RESP"), (b"+one\r\n+two\r\n", "a reply without a request")],
)
async def test_an_invalid_reply_closes_the_connection(data: bytes, said: str) -> None:
    connection, transport = connected()
    replies: list[Any] = []
    losses: list[bool] = []
    connection.on_loss(lambda: losses.append(connection.is_up))
    connection.request(b"x", replies.append)
    connection.data_received(data)
    assert transport.is_aborted
    assert losses == [False]
    assert connection.loss is not None
    assert said in str(connection.loss)


async def test_a_lost_connection_fails_requests_in_flight_and_later_ones() -> None:
    connection, _ = connected()
    replies: list[Any] = []
    connection.request(b"x", replies.append)
    connection.request(b"y", replies.append)
    connection.connection_lost(OSError("cable pulled"))
    connection.request(b"z", replies.append)
    assert [type(reply) for reply in replies] == [ConnectionLost] * 3
    assert all("cable pulled" in str(reply) for reply in replies)


async def test_requests_not_yet_written_are_dropped_when_the_connection_is_lost() -> None:
    connection, transport = connected()
    connection.request(b"x", lambda reply: None)
    connection.request(b"y", lambda reply: None)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert transport.writes == [b"x"]


async def test_the_response_timeout_counts_from_the_last_reply_or_request() -> None:
    connection, _ = connected(response_timeout_secs=0.05)
    replies: list[Any] = []
    connection.request(b"x", replies.append)
    connection.data_received(b"+one\r\n")
    await asyncio.sleep(0.12)  # no request in flight: silence is fine
    assert connection.is_up
    connection.request(b"y", replies.append)
    connection.request(b"z", replies.append)
    connection.data_received(b"+two\r\n")
    await until(lambda: not connection.is_up, "the connection timed out")
    assert replies[1] == b"two"
    assert "no reply from" in str(replies[2])


# --- the Client


async def test_a_hanging_server_times_out_and_is_reconnected_to(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    async with open_client(server.url, response_timeout_secs=0.1) as client:
        assert await client.call("PING") == b"PONG"
        server.pause()
        with pytest.raises(ConnectionLost, match="no reply from") as caught:
            await client.call("PING", resend=False)
        assert caught.value.code == "CMQ-001"
        server.resume()
        assert await client.call("PING") == b"PONG"


async def test_a_call_that_may_run_twice_survives_a_hanging_server(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    async with open_client(server.url, response_timeout_secs=0.1) as client:
        await client.up()
        server.pause()
        answer = asyncio.ensure_future(client.call("PING"))
        await until(lambda: client.connection is None, "the connection timed out")
        server.resume()
        assert await answer == b"PONG"


async def test_a_server_that_never_replies_to_the_login_times_out(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    server.pause()
    async with open_client(server.url, response_timeout_secs=0.05) as client:
        said = rf"127\.0\.0\.1:{server.port} within 0\.\d s: connection lost: no reply from"
        with pytest.raises(Unreachable, match=said):
            await client.up(0.3)
        server.resume()
        assert await client.call("PING") == b"PONG"


async def test_an_unreachable_server_is_an_error_that_says_where_and_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = taken.getsockname()[1]
        async with open_client(f"redis://127.0.0.1:{port}") as client:
            with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port} within 0\.\d s: cannot connect") as caught:
                await client.call("PING", patience_secs=0.2)
    assert caught.value.code == "CMQ-001"


async def test_connecting_to_a_host_that_drops_packets_times_out() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:  # a backlog of 0 takes one or two; the kernel drops what comes after
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            async with open_client(f"redis://127.0.0.1:{full.getsockname()[1]}", connect_timeout_secs=0.1) as client:
                with pytest.raises(Unreachable, match=r"did not accept a connection in 0\.1 s"):
                    await client.up(0.5)
        finally:
            for filler in fillers:
                filler.close()


async def test_a_closed_client_raises(server: Server) -> None:
    async with open_client(server.url) as client:
        assert await client.call("PING") == b"PONG"
    with pytest.raises(ShutdownError) as caught:
        await client.call("PING")
    assert caught.value.code == "CMQ-005"


async def test_closing_cancels_an_attempt_to_connect() -> None:
    async with open_client("redis://127.0.0.1:1") as client:
        attempt = client.connect_in_background()
        await asyncio.sleep(0)
    assert attempt.cancelled()


async def test_callers_that_wait_for_a_connection_share_one(server: Server) -> None:
    async with open_client(server.url) as client:
        assert await asyncio.gather(*(client.call("ECHO", number) for number in range(50))) == [
            b"%d" % number for number in range(50)
        ]
        assert client.connections_made == 1


async def test_a_cancelled_caller_does_not_affect_the_others(server: Server) -> None:
    async with open_client(server.url) as client:
        await client.up()
        calls = [asyncio.ensure_future(client.call("ECHO", number)) for number in range(3)]
        await asyncio.sleep(0)
        calls[1].cancel()
        assert await calls[0] == b"0"
        assert await calls[2] == b"2"


async def test_callbacks_run_for_each_connection_and_each_loss(server: Server) -> None:
    async with Proxy(server.address) as proxy, open_client(proxy.url) as client:
        heard: list[str] = []
        client.on_up(lambda connection: heard.append("up"))
        client.on_loss(lambda: heard.append("lost"))
        await client.up()
        proxy.cut()
        await until(lambda: "lost" in heard, "on_loss was called")
        await client.up()
        assert heard == ["up", "lost", "up"]
        assert client.connections_made == 2


@pytest.mark.parametrize("direction", ["request", "reply"])
async def test_a_call_cut_at_any_byte_is_sent_again(server: Server, direction: str) -> None:
    async with Proxy(server.address) as proxy, open_client(proxy.url) as client:
        await client.up()
        size = len(b"*2\r\n$4\r\nECHO\r\n$5\r\nhello\r\n") if direction == "request" else len(b"$5\r\nhello\r\n")
        for offset in range(size):
            cut = proxy.cut_requests_after if direction == "request" else proxy.cut_replies_after
            cut(offset)
            assert await client.call("ECHO", "hello") == b"hello"
        assert client.connections_made >= size


async def test_a_connection_cut_during_login_is_retried(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LAST_BACKOFF_SECS", 0.001)
    async with Proxy(server.address) as proxy, open_client(proxy.url, scripts=[ECHO]) as client:
        await client.up()
        greeting, greeted = proxy.link.request_bytes, proxy.link.reply_bytes
        proxy.cut()
        for size in range(0, greeting, 7):
            proxy.next_budgets.append((size, None))
        for size in range(0, greeted, 7):
            proxy.next_budgets.append((None, size))
        assert await client.run(ECHO, ["{chasqui:q}:k"], ["a"], patience_secs=30) == [b"{chasqui:q}:k", b"a"]
        assert not proxy.next_budgets


async def test_a_cancelled_call_does_not_take_the_reply_of_another(server: Server) -> None:
    async with open_client(server.url) as client:
        await client.up()
        calls = [asyncio.ensure_future(client.call("ECHO", f"{number}" * 100)) for number in range(20)]
        await asyncio.sleep(0)
        for call in calls[1::2]:
            call.cancel()
        kept = await asyncio.gather(*calls[::2])
        assert kept == [f"{number}".encode() * 100 for number in range(0, 20, 2)]


# --- addresses


async def test_a_server_on_a_unix_socket(fresh_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = fresh_server(unixsocket=path)
    with redis.Redis(port=server.port, db=3) as admin:
        admin.set("where", "here")
    async with open_client(f"unix://{path}?db=3") as client:
        assert await client.call("GET", "where") == b"here"


async def test_a_server_on_ipv6(fresh_server: Callable[..., Server]) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    server = fresh_server(bind="127.0.0.1 ::1")
    async with open_client(f"redis://[::1]:{server.port}") as client:
        assert await client.call("PING") == b"PONG"


async def test_a_missing_unix_socket_is_unreachable(tmp_path: Path) -> None:
    async with open_client(f"unix://{tmp_path}/none") as client:
        with pytest.raises(Unreachable, match=f"{tmp_path}/none"):
            await client.up(0.1)


async def test_the_database_of_the_url_is_selected_on_every_connection(server: Server) -> None:
    with redis.Redis(port=server.port, db=5) as admin:
        admin.set("here", "yes")
    async with Proxy(server.address) as proxy, open_client(f"{proxy.url}/5") as client:
        assert await client.call("GET", "here") == b"yes"
        proxy.cut()
        assert await client.call("GET", "here") == b"yes"


async def test_a_database_that_does_not_exist_is_an_error_at_once(server: Server) -> None:
    async with open_client(f"{server.url.removesuffix('/0')}/9999") as client:
        with pytest.raises(Exception, match="DB index is out of range"):
            await asyncio.wait_for(client.up(), 5)


@pytest.mark.servers
async def test_the_connection_has_a_name_in_client_list(server: Server | Cluster) -> None:
    async with open_client(server.url) as client:
        assert await client.call("CLIENT", "GETNAME") == b"tampu"


# --- scripts


@pytest.mark.servers
async def test_scripts_are_loaded_once_per_connection_and_never_per_call(server: Server | Cluster) -> None:
    nodes = server.nodes if hasattr(server, "nodes") else [server]
    for node in nodes:
        node.client().config_resetstat()
    async with open_client(server.url, scripts=[ECHO]) as client:
        for number in range(20):
            assert await client.run(ECHO, ["{chasqui:q}:k"], [number]) == [b"{chasqui:q}:k", b"%d" % number]
    calls: dict[str, int] = {}
    for node in nodes:
        for command, counts in node.client().info("commandstats").items():
            calls[command] = calls.get(command, 0) + counts["calls"]
    assert sum(count for command, count in calls.items() if command.startswith("cmdstat_script")) == 1
    assert calls["cmdstat_evalsha"] == 20
    assert "cmdstat_eval" not in calls


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_is_requested_now_has_left_before_the_loop_runs_again(
    server: Server, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A process that ends in the very next line has sent it."""
    replies: list[Any] = []

    async def main() -> None:
        async with open_client(server.url) as client:
            connection = await client.up()
            packed = pack_command(("SET", "now", "1"))
            await until(lambda: connection.request_now(packed, replies.append), "nothing else waits to be sent")
            with server._connect() as other:  # without a turn of the event loop
                eventually(lambda: other.get("now") == b"1", "the server has it")
            assert replies == []
            await connection.ask("PING")
            assert replies in (["OK"], [b"OK"])

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_what_cannot_leave_now_is_not_sent() -> None:
    connection, transport = connected()
    transport.get_write_buffer_size = lambda: 1  # type: ignore[method-assign]
    assert not connection.request_now(b"PING", lambda reply: None)
    assert transport.writes == []
