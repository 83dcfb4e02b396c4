"""Tests run on a temporary server. TAMPU_URL is set before the queue is imported, which reads it."""

import os
from collections.abc import Iterator

import pytest

os.environ["TAMPU_URL"] = "embedded://"


@pytest.fixture(autouse=True)
def empty_queue(tampu_server: object) -> Iterator[None]:
    """Begin every test with an empty queue."""
    from sample_project.tasks import queue

    yield
    queue.sync.purge()
