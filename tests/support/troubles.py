"""Collects logged warnings and errors, for tests that expect them, or expect none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Troubles(list[str]):
    """Messages logged at level warning and above, in order."""

    def about(self, word: str) -> list[str]:
        return [text for text in self if word in text]


@pytest.fixture
def troubles() -> Iterator[Troubles]:
    """Collect messages while the test runs."""
    texts = Troubles()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("tampu").addHandler(listener)
    yield texts
    logging.getLogger("tampu").removeHandler(listener)
