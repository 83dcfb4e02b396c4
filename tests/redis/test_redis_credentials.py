"""Logging in: passwords, ACL users, credential providers, and TLS with a private authority."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider

from support.clients import open_client
from support.proxy import Proxy
from support.users import acl_user
from support.waiting import until
from tampu.errors import ConfigError, RedisError
from tampu.redis.faults import ServerError, Unreachable
from tampu.redis.scripts import Script
from tampu.redis.settings import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.cluster import Cluster
    from servers.process import Server

#: Much less than the 10 s that a call waits for a temporary error: permanent errors must fail at once.
AT_ONCE_SECS = 4.0


def url_of(server: Server, login: str = "") -> str:
    return f"redis://{login}127.0.0.1:{server.port}"


async def whoami(client: Any) -> str:
    return (await client.call("ACL", "WHOAMI")).decode()


async def test_a_password_of_the_url_logs_in(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", requirepass="s3cret/p@ss:word")
    async with open_client(url_of(server, ":s3cret%2Fp%40ss:word@")) as client:
        assert await whoami(client) == "default"


async def test_an_acl_user_of_the_url_logs_in(server: Server) -> None:
    with acl_user(server, "ada", "pw"):
        async with open_client(url_of(server, "ada:pw@")) as client:
            assert await whoami(client) == "ada"


@pytest.mark.parametrize("login", ["ada:wrong@", "nobody:pw@"])
async def test_a_wrong_password_is_an_error_at_once(server: Server, login: str) -> None:
    with acl_user(server, "ada", "pw"):
        async with open_client(url_of(server, login)) as client, asyncio.timeout(AT_ONCE_SECS):
            with pytest.raises(ServerError, match="wrong user name or password") as caught:
                await client.up()
        assert caught.value.kind == "WRONGPASS"
        assert caught.value.code == "CMQ-001"
        assert "wrong@" not in str(caught.value)


async def test_a_wrong_password_is_reported_before_the_errors_it_causes(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server("redis86", requirepass="pw")
    scripts = [Script("one", "return 1"), Script("two", "return 2")]  # loading them is refused as well
    async with open_client(url_of(server, ":wrong@"), scripts=scripts) as client, asyncio.timeout(AT_ONCE_SECS):
        with pytest.raises(ServerError, match="wrong user name or password"):
            await client.up()


async def test_a_missing_password_is_an_error_at_once(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", requirepass="pw")
    async with open_client(url_of(server)) as client, asyncio.timeout(AT_ONCE_SECS):
        with pytest.raises(ServerError, match="add it to the URL") as caught:
            await client.call("PING")
    assert caught.value.kind == "NOAUTH"


async def test_a_password_for_a_server_without_one_is_an_error_at_once(server: Server) -> None:
    async with open_client(url_of(server, ":pw@")) as client, asyncio.timeout(AT_ONCE_SECS):
        with pytest.raises(
            ServerError, match="the server has no password for the default user: remove it from the URL"
        ):
            await client.up()


async def test_a_user_without_a_password_is_a_config_error(server: Server) -> None:
    async with open_client(url_of(server, "ada@")) as client:
        with pytest.raises(ConfigError, match="has user 'ada' but no password"):
            await client.up()


async def test_a_user_without_client_setname_can_log_in(server: Server) -> None:
    with acl_user(server, "ada", "pw", "~*", "+@all", "-client"):
        async with open_client(url_of(server, "ada:pw@")) as client:
            assert await whoami(client) == "ada"


# --- providers


class Vault:
    """Returns credentials, and records how often and for which server."""

    def __init__(self, username: str | None = "ada", password: str = "pw") -> None:
        self.username = username
        self.password = password
        self.asked: list[str | None] = []

    def ask(self, server: str | None) -> tuple[str | None, str | None]:
        self.asked.append(server)
        return self.username, self.password

    async def ask_slowly(self, server: str | None) -> tuple[str | None, str | None]:
        await asyncio.sleep(0)
        return self.ask(server)


class VaultProvider(CredentialProvider):
    """A `Vault` as a redis-py provider."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        username, password = self.vault.ask("redis-py")
        assert password is not None
        return (password,) if username is None else (username, password)


@pytest.mark.parametrize("form", ["function", "coroutine", "redis-py"])
async def test_a_provider_is_asked_for_every_connection(server: Server, form: str) -> None:
    with acl_user(server, "ada", "pw"):
        vault = Vault()
        forms = {"function": vault.ask, "coroutine": vault.ask_slowly, "redis-py": VaultProvider(vault)}
        async with (
            Proxy(server.address) as proxy,
            open_client(proxy.url.replace("redis://", "redis://old:older@"), credential_provider=forms[form]) as client,
        ):
            assert await whoami(client) == "ada"
            assert len(vault.asked) == 1
            proxy.cut()
            await until(lambda: client.connection is None, "the connection is lost")
            assert await whoami(client) == "ada"
            assert len(vault.asked) == 2
            expected = "redis-py" if form == "redis-py" else f"127.0.0.1:{proxy.port}"
            assert vault.asked == [expected] * 2


async def test_a_redis_py_provider_works(server: Server) -> None:
    with acl_user(server, "ada", "pw"):
        provider = UsernamePasswordCredentialProvider("ada", "pw")
        async with open_client(server.url, credential_provider=provider) as client:
            assert await whoami(client) == "ada"


async def test_a_provider_may_return_only_a_password(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", requirepass="pw")
    for provider in (lambda where: (None, "pw"), lambda where: ("pw",), VaultProvider(Vault(None))):
        async with open_client(url_of(server), credential_provider=provider) as client:
            assert await whoami(client) == "default"


async def test_a_provider_may_return_no_credentials(server: Server) -> None:
    async with open_client(server.url, credential_provider=lambda where: (None, None)) as client:
        assert await whoami(client) == "default"


async def test_a_password_rotated_while_connected_is_used_at_the_next_connection(server: Server) -> None:
    with acl_user(server, "ada", "old"):
        vault = Vault(password="old")
        async with open_client(server.url, credential_provider=vault.ask) as client:
            assert await whoami(client) == "ada"
            server.client().execute_command("ACL", "SETUSER", "ada", "resetpass", ">new")
            vault.password = "new"
            assert await whoami(client) == "ada"  # an open connection stays logged in
            server.client().execute_command("CLIENT", "KILL", "USER", "ada")
            assert await whoami(client) == "ada"
            assert len(vault.asked) == 2


async def test_a_logged_out_connection_reconnects_with_fresh_credentials(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server("redis86", requirepass="pw")
    vault = Vault(None)
    async with open_client(url_of(server), credential_provider=vault.ask) as client:
        await client.up()
        assert await client.call("RESET") == b"RESET"  # logs out: the next request gets NOAUTH
        assert await client.call("PING") == b"PONG"
        assert len(vault.asked) == 2


async def test_a_stale_password_fails_at_once_and_a_new_one_works_again(server: Server) -> None:
    with acl_user(server, "ada", "new"):
        vault = Vault(password="old")
        async with open_client(server.url, credential_provider=vault.ask) as client, asyncio.timeout(AT_ONCE_SECS):
            with pytest.raises(ServerError, match="WRONGPASS"):
                await client.call("PING")
            vault.password = "new"
            assert await whoami(client) == "ada"


async def test_a_provider_that_fails_for_a_moment_is_asked_again(server: Server) -> None:
    with acl_user(server, "ada", "pw"):
        answers: list[Any] = [OSError("the vault is sealed"), OSError("still sealed"), ("ada", "pw")]

        def provider(where: str | None) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async with open_client(server.url, credential_provider=provider) as client:
            assert await whoami(client) == "ada"


async def test_a_provider_that_keeps_failing_is_named_in_the_error(server: Server) -> None:
    def provider(where: str | None) -> tuple[str, str]:
        raise LookupError("no such secret")

    async with open_client(server.url, credential_provider=provider) as client:
        with pytest.raises(Unreachable, match="credential_provider failed: LookupError") as caught:
            await client.up(0.2)
    assert caught.value.code == "CMQ-001"


@pytest.mark.parametrize(
    ("provider", "named"),
    [("pw", "must be a callable"), (lambda where: "pw", "must return"), (lambda where: ("a", "b", "c"), "must return")],
)
async def test_a_provider_of_the_wrong_form_is_a_config_error(server: Server, provider: Any, named: str) -> None:
    async with open_client(server.url, credential_provider=provider) as client:
        with pytest.raises(ConfigError, match=f"credential_provider {named}"):
            await client.up()


@pytest.mark.servers("cluster86")
@pytest.mark.parametrize("form", ["url", "function", "redis-py"])
async def test_a_cluster_is_logged_in_to_for_its_topology_as_well(server: Cluster, form: str) -> None:
    with contextlib.ExitStack() as users:
        for node in server.nodes:
            users.enter_context(acl_user(node, "ada", "pw"))
            admin = node.client()  # logged in before the default user loses its rights
            admin.execute_command("ACL", "SETUSER", "default", "-@all", "+acl")
            users.callback(admin.execute_command, "ACL", "SETUSER", "default", "+@all")
        vault = Vault()
        provider = {"url": None, "function": vault.ask, "redis-py": VaultProvider(vault)}[form]
        login = "ada:pw@" if form == "url" else ""
        url = server.url.replace("redis+cluster://", f"redis+cluster://{login}")
        async with open_client(url, credential_provider=provider) as client:
            assert await whoami(client) == "ada"
            assert await client.call("SET", "{chasqui:q}:k", "v") == b"OK"


@pytest.mark.servers("cluster86")
async def test_a_wrong_password_for_a_cluster_is_an_error_at_once(server: Cluster) -> None:
    url = server.url.replace("redis+cluster://", "redis+cluster://nobody:wrong@")
    async with open_client(url) as client, asyncio.timeout(AT_ONCE_SECS):
        with pytest.raises(ServerError, match="wrong user name or password"):
            await client.up()


@pytest.mark.servers("cluster86")
async def test_a_missing_password_for_a_cluster_is_an_error_at_once(server: Cluster) -> None:
    server.config_set(requirepass="pw")
    try:
        async with open_client(server.url) as client, asyncio.timeout(AT_ONCE_SECS):
            with pytest.raises(ServerError, match="add it to the URL"):
                await client.up()
    finally:
        for node in server.nodes:
            with node._connect(password="pw") as admin:
                admin.config_set("requirepass", "")


# --- TLS


async def test_tls_with_a_private_authority(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True)
    assert "ssl_ca_certs=" in server.url
    async with open_client(server.url) as client:
        assert await client.call("SET", "k", "v") == b"OK"
        assert server.client().get("k") == b"v"


async def test_tls_with_a_password(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True, requirepass="pw")
    async with open_client(server.url) as client:
        assert await client.call("PING") == b"PONG"


async def test_a_certificate_of_an_unknown_authority_is_rejected(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True)
    async with open_client(f"rediss://127.0.0.1:{server.port}") as client:
        with pytest.raises(RedisError, match=r"(?i)certificate verify failed"):
            await client.up(2)  # on a busy machine, a handshake takes a while


async def test_a_certificate_for_another_host_needs_check_hostname_false(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server("redis86", tls=True, bind="127.0.0.1 127.0.0.2")
    url = server.url.replace("127.0.0.1", "127.0.0.2")
    async with open_client(url) as client:
        with pytest.raises(RedisError, match=r"(?i)certificate is not valid for"):
            await client.up(2)
    async with open_client(f"{url}&ssl_check_hostname=false") as client:
        assert await client.call("PING") == b"PONG"


async def test_plain_text_to_a_tls_port_is_an_error_and_not_a_hang(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True)
    async with open_client(f"redis://127.0.0.1:{server.port}") as client:
        with pytest.raises(RedisError):
            await client.up(0.3)


async def test_a_client_certificate_is_sent_when_the_server_requests_one(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("redis86", tls=True)
    server.config_set(tls_auth_clients="yes")
    certificates = server.certificates
    assert certificates is not None
    async with open_client(server.url) as client:
        with pytest.raises(RedisError):
            await client.up(0.3)
    url = f"{server.url}&ssl_certfile={certificates.certificate}&ssl_keyfile={certificates.key}"
    assert parse_url(url).certfile == str(certificates.certificate)
    async with open_client(url) as client:
        assert await client.call("PING") == b"PONG"


@pytest.mark.parametrize(
    "answer", ["ERR unknown command `AUTH`, with args beginning with: `s3cret`", "WRONGPASS s3cret"]
)
async def test_the_error_of_a_login_never_repeats_the_password(answer: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(f"-{answer}\r\n".encode() * 4)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with open_client(f"redis://:s3cret@127.0.0.1:{port}") as client, asyncio.timeout(AT_ONCE_SECS):
            with pytest.raises(RedisError) as raised:
                await client.up()
    shown = "".join(traceback.format_exception(raised.value))
    assert "refused the login" in shown
    assert "s3cret" not in shown


@pytest.mark.parametrize("url", ["unix://u:s3cret/x@h", "embedded://u:s3/cret@h", "redis://u:s3/cret@h"])
def test_a_password_with_a_slash_is_shown_nowhere(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_url(url)
    assert "s3" not in str(raised.value)


def test_the_path_of_a_socket_may_contain_an_at_sign() -> None:
    assert parse_url("unix:///run/a@b.sock").addresses[0].path == "/run/a@b.sock"
