"""Fixtures for all tests: real servers, each on a free loopback port with its own folder.

| fixture          | value                                                                                            |
|------------------|--------------------------------------------------------------------------------------------------|
| `server`         | a server shared by the whole run, up, empty and with its initial configuration: embedded Valkey   |
|                  | with `@pytest.mark.servers`: each kind in turn, if the file is in `MATRIX` (servers/fast.py);     |
|                  | `@pytest.mark.servers("redis86")`: only that kind                                                 |
|                  | kinds: valkey, redis62, redis70, redis86, cluster86                                              |
| `server_kind`    | the name of that kind, for a test that starts its own servers                                     |
| `fresh_server`   | `fresh_server(kind="valkey", tls=False, **settings)`: a private server, to kill or reconfigure    |
| `fresh_sentinel` | `fresh_sentinel(sentinels=1)`: a master, its replica and sentinels of Redis 8.6                   |
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from servers.binaries import KINDS
from servers.fast import is_fast, is_in_matrix, may_be_fast
from servers.require import require_server
from servers.sentinel import SentinelSetup
from servers.shared import SharedServers, make_server
from support.tracing import traced_by

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from servers.cluster import Cluster
    from servers.process import Server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only quick tests that need no server but the embedded one")
    parser.addoption(
        "--all-servers", action="store_true", help="run every test marked `servers` on each kind of server"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what `--fast` does not run before it is imported: with it, collecting takes twice as long."""
    inside = collection_path.relative_to(config.rootpath) if collection_path.is_relative_to(config.rootpath) else None
    return True if inside and config.getoption("--fast") and not may_be_fast(inside) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        left_out = [item for item in items if not is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_fast(item)]


def pytest_configure() -> None:
    """Take SIGINT back when the run was started in the background.

    A shell starts background jobs with SIGINT ignored. Every child inherits that, and Python does not reset it, so the
    programs that tests interrupt would not notice.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Suspend coverage while a test marked `untraced` runs: tracing would change what it counts."""
    if item.get_closest_marker("untraced") is None:
        return (yield)
    with traced_by(None):
        return (yield)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked `servers` on each kind named in the mark, or on every kind; run other tests on Valkey.

    Without `--all-servers`, a mark that names no kinds counts only where scripts and protocol differ: see `MATRIX`.
    """
    mark = metafunc.definition.get_closest_marker("servers")
    if "server_kind" in metafunc.fixturenames:
        has_matrix = metafunc.config.getoption("--all-servers") or is_in_matrix(metafunc.definition.path)
        kinds = mark.args or (tuple(KINDS) if has_matrix else ("valkey",)) if mark else ("valkey",)
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
def server(server_kind: str, shared_servers: SharedServers) -> Iterator[Server | Cluster]:
    """Yield a server that is up and empty; changes made by a test are undone before the next one.

    If it crashes, the test fails with the end of its log.
    """
    server = shared_servers.get(server_kind)
    yield server
    server.require_no_crash()


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start private servers: `fresh_server("redis86", appendonly="yes")`; see `make_server`."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(kind: str = "valkey", **options: Any) -> Server | Cluster:
            server = make_server(kind, tmp_path / f"{kind}-{next(numbers)}", **options)
            stack.callback(server.stop)
            server.start()
            stack.callback(server.require_no_crash)  # is called before `stop`
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
            stack.callback(setup.require_no_crash)
            return setup

        yield start
