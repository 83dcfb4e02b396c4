"""What the engine complains about, for tests that say it must, or must not, or only once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Troubles(list[str]):
    """The texts logged at warning and above, in order."""

    def about(self, word: str) -> list[str]:
        return [text for text in self if word in text]


@pytest.fixture
def troubles() -> Iterator[Troubles]:
    """Fills while the test runs."""
    texts = Troubles()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("tampu").addHandler(listener)
    yield texts
    logging.getLogger("tampu").removeHandler(listener)
