"""Fixtures for tests of the command line: commands use the test's server through TAMPU_URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cli.shop import Filled, fill

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove environment variables that would change what commands do."""
    for variable in ("TAMPU_URL", "TAMPU_JSON", "TAMPU_RAW", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty server, which commands use by default."""
    monkeypatch.setenv("TAMPU_URL", server.url)
    return server.url


@pytest.fixture
def fresh_shop(url: str) -> Filled:
    """Fill a queue with jobs in every state, just now."""
    return fill(url)


#: What `shop` was filled with, and a dump of every key.
_filled: list[tuple[Filled, dict[bytes, bytes]]] = []


@pytest.fixture
def shop(server: Server, url: str) -> Filled:
    """Fill a queue with jobs in every state; after the first time, restore it from a dump, which is faster."""
    client = server.client()
    if not _filled:
        filled = fill(url)
        _filled.append((filled, {key: client.dump(key) for key in client.scan_iter() if b":pseq:" not in key}))
        return filled
    filled, dumps = _filled[0]
    for key, dump in dumps.items():
        client.restore(key, 3_600_000 if b":result:" in key or key.endswith(b":due") else 0, dump)
    return filled
