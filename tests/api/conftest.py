"""Fixtures of these tests: a queue on the shared server, closed after the test."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tampu import Queue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from servers.process import Server


@pytest_asyncio.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    """Create a queue on an empty server."""
    async with Queue("q", url=server.url) as queue:
        yield queue


@pytest.fixture
def process_tasks(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module with the URL in the environment, as the worker's child processes do."""
    monkeypatch.setenv("TAMPU_URL", server.url)
    monkeypatch.delitem(sys.modules, "api.process_tasks", raising=False)
    return importlib.import_module("api.process_tasks")
