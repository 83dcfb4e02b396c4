"""Keeps background loops running if a round raises an error; `Failures` logs an error once and backs off."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tampu.errors import RedisError
from tampu.redis.client import backoff_secs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("tampu.worker")


class Failures:
    """The failures of one role in a row: logs each error once, and says how long to back off."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._count = 0
        self._last_text = ""

    def record(self, error: Exception) -> float:
        """Record a failure. Return the seconds to wait before the next attempt."""
        self._count += 1
        text = f"{type(error).__name__}: {error}"
        if text != self._last_text:
            logger.warning("%s failed; retrying: %s", self._role, text, exc_info=_unexpected(error))
            self._last_text = text
        return backoff_secs(self._count)

    def clear(self) -> None:
        """Record a success."""
        if self._count:
            logger.info("%s recovered after %d failure%s", self._role, self._count, "" if self._count == 1 else "s")
            self._count = 0
            self._last_text = ""


async def supervise(role: str, one_round: Callable[[], Awaitable[None]], is_over: Callable[[], bool]) -> None:
    """Call `one_round` until `is_over()`. After an error, log it if it is new, back off and continue."""
    failures = Failures(role)
    while not is_over():
        try:
            await one_round()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await asyncio.sleep(failures.record(error))
        else:
            failures.clear()


def _unexpected(error: Exception) -> Exception | None:
    """Return the error, for its traceback, unless a server or the network caused it."""
    return None if isinstance(error, RedisError) else error
