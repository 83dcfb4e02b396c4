"""Runs a loop's body again and again, whatever it raises: one bad round never ends a worker's part."""

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
    """Run `one_round` until `is_over`. An error is logged when it first appears or changes, then the loop backs off."""
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
                logger.warning("%s is in trouble and goes on trying: %s", role, text, exc_info=_unexpected(error))
                last_text = text
            await asyncio.sleep(backoff_secs(failures))
        else:
            if failures:
                logger.info("%s works again after %d failures", role, failures)
            failures = 0
            last_text = ""


def _unexpected(error: Exception) -> Exception | None:
    """A traceback only for what is not an error of a server."""
    return None if isinstance(error, RedisError) else error
