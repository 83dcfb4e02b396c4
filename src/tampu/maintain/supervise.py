"""Keeps a worker's background loops running, whatever one round raises."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tampu.errors import RedisError
from tampu.redis.client import backoff_secs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("tampu.worker")


async def supervise(role: str, one_round: Callable[[], Awaitable[None]], is_over: Callable[[], bool]) -> None:
    """Call `one_round` until `is_over()`. After an error, log it if it is new, back off and continue."""
    failures = 0
    last_text = ""
    while not is_over():
        try:
            await one_round()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failures += 1
            text = f"{type(error).__name__}: {error}"
            if text != last_text:
                logger.warning("%s failed; retrying: %s", role, text, exc_info=_unexpected(error))
                last_text = text
            await asyncio.sleep(backoff_secs(failures))
        else:
            if failures:
                logger.info("%s recovered after %d failure%s", role, failures, "" if failures == 1 else "s")
            failures = 0
            last_text = ""


def _unexpected(error: Exception) -> Exception | None:
    """Return the error, for its traceback, unless a server or the network caused it."""
    return None if isinstance(error, RedisError) else error
