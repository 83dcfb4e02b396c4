"""Fixtures of the command line's tests: the server of the test is the one in TAMPU_URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cli.shop import Filled, fill

if TYPE_CHECKING:
    from servers.process import Server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of whoever runs the tests changes what commands do."""
    for variable in ("TAMPU_URL", "TAMPU_JSON", "TAMPU_YES", "TAMPU_RAW", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty server, which commands use without being told."""
    monkeypatch.setenv("TAMPU_URL", server.url)
    return server.url


@pytest.fixture
def fresh_shop(url: str) -> Filled:
    """A queue with something of everything in it, filled a moment ago."""
    return fill(url)


#: What `shop` was filled with, and every key of it as it was then.
_filled: list[tuple[Filled, dict[bytes, bytes]]] = []


@pytest.fixture
def shop(server: Server, url: str) -> Filled:
    """The same, filled once in a run and copied from then on, which is quicker."""
    client = server.client()
    if not _filled:
        filled = fill(url)
        _filled.append((filled, {key: client.dump(key) for key in client.scan_iter() if b":pseq:" not in key}))
        return filled
    filled, dumps = _filled[0]
    for key, dump in dumps.items():
        client.restore(key, 3_600_000 if b":result:" in key or b":didx:" in key else 0, dump)
    return filled
