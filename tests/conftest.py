"""Fixtures for all tests: real servers, each on a free loopback port with its own folder.

| fixture          | value                                                                                            |
|------------------|--------------------------------------------------------------------------------------------------|
| `server`         | a server shared by the whole run, up, empty and with its initial configuration: embedded Valkey   |
|                  | with `@pytest.mark.servers`: each kind in turn; `@pytest.mark.servers("redis86")`: only that kind |
| `server_kind`    | the name of that kind, for a test that starts its own servers                                     |
| `fresh_server`   | `fresh_server(kind="valkey", tls=False, **settings)`: a private server, to kill or reconfigure    |
| `fresh_sentinel` | `fresh_sentinel(sentinels=1)`: a master, its replica and sentinels of Redis 8.6                   |
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from servers.binaries import KINDS
from servers.require import require_server
from servers.sentinel import SentinelSetup
from servers.shared import SharedServers, make_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.cluster import Cluster
    from servers.process import Server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked `servers` once per kind, or per kind named in the mark; run other tests on Valkey."""
    mark = metafunc.definition.get_closest_marker("servers")
    if "server_kind" in metafunc.fixturenames:
        kinds = (mark.args or tuple(KINDS)) if mark else ("valkey",)
        if unknown := set(kinds) - set(KINDS):
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: unknown servers {unknown}; choose from {set(KINDS)}"
            )
        metafunc.parametrize("server_kind", kinds)
    elif mark:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} is marked `servers` but does not use `server`")


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    """Return the servers that the tests of this run share."""
    servers = SharedServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture
def server(server_kind: str, shared_servers: SharedServers) -> Server | Cluster:
    """Return a server that is up and empty; changes made by a test are undone before the next one."""
    return shared_servers.get(server_kind)


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start private servers: `fresh_server("redis86", appendonly="yes")`; see `make_server`."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(kind: str = "valkey", **options: Any) -> Server | Cluster:
            server = make_server(kind, tmp_path / f"{kind}-{next(numbers)}", **options)
            stack.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def fresh_sentinel(tmp_path: Path) -> Iterator[Callable[..., SentinelSetup]]:
    """Start a master, its replica and sentinels: `fresh_sentinel(sentinels=3)`."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(sentinels: int = 1) -> SentinelSetup:
            binary = Path(require_server("redis86"))
            setup = SentinelSetup(binary, tmp_path / f"sentinel-{next(numbers)}", sentinels)
            stack.callback(setup.stop)
            setup.start()
            return setup

        yield start
