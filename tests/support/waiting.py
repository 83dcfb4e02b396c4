"""Waits for conditions without blocking the event loop."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long a condition may take on a busy machine, in seconds; on an idle one it takes milliseconds.
PATIENCE_SECS = 20.0


async def until(condition: Callable[[], Any], what: str, within_secs: float = PATIENCE_SECS) -> Any:
    """Wait until the condition, a function or a coroutine function, is truthy, and return its value."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_secs
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() > deadline:
            raise AssertionError(f"not within {within_secs:g} s: {what}")
        await asyncio.sleep(0.002)
