"""Fixtures of the consumer's tests."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from consume.views import WorkerView
from consume.workers import QUEUE, fleet_in
from support.troubles import troubles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from consume.workers import Fleet
    from servers.cluster import Cluster
    from servers.process import Server


__all__ = ["troubles"]


@pytest.fixture(autouse=True)
async def nothing_is_left_running() -> AsyncIterator[None]:
    """Check that a stopped consumer leaves no asyncio task and no thread."""
    yield
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("tampu")]
    for thread in threading.enumerate():
        if thread.name == "tampu-leases":
            thread.join(2)  # it has logged its end, but may still be running
            left += [thread.name] if thread.is_alive() else []
    assert left == []


@pytest.fixture
def view(server: Server | Cluster) -> WorkerView:
    """Return a view of the queue on the test's server."""
    return WorkerView(server, QUEUE)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Start workers in separate processes: `fleet.start(url, "sleeping")`. All are ended after the test."""
    with fleet_in(tmp_path) as fleet:
        yield fleet
