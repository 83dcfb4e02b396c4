"""Waiting on conditions, without blocking the event loop that has to bring them about."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long a condition may take on a busy machine; it takes milliseconds on a quiet one.
PATIENCE_SECS = 20.0


async def until(condition: Callable[[], Any], what: str, within_secs: float = PATIENCE_SECS) -> Any:
    """Waits until the condition, a function or a coroutine function, is truthy; returns its value."""
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
