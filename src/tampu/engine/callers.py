"""How a handler is called: on the event loop, in a thread, or in a process; each with its timeout."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from tampu.engine.processes import Processes
    from tampu.wire.job import Job

    Handler = Callable[[Job[Any]], Any]
    Caller = Callable[[Job[Any]], Awaitable[Any]]


def is_coroutine_handler(handler: Handler) -> bool:
    """Whether calling it gives a coroutine; an object with an `async def __call__` counts."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def on_loop(handler: Handler, timeout_secs: float | None) -> Caller:
    """An `async def` handler on the event loop; it is cancelled at its timeout."""
    if timeout_secs is None:
        return handler

    async def call(job: Job[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_secs) as limit:
                return await handler(job)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"the handler was cancelled at its timeout of {timeout_secs:g} s") from None
            raise  # its own

    return call


def in_thread(handler: Handler, threads: Executor, timeout_secs: float | None) -> Caller:
    """A `def` handler in a thread. A thread cannot be killed: at its timeout it has failed, but only when it ends."""
    loop = asyncio.get_running_loop()

    def handle(job: Job[Any]) -> Any:
        try:
            return handler(job)
        except StopIteration as error:
            # No future can carry one: it would never be done.
            raise RuntimeError("the handler raised StopIteration") from error

    async def call(job: Job[Any]) -> Any:
        started = time.monotonic()
        result = await loop.run_in_executor(threads, handle, job)
        if inspect.isawaitable(result):
            result = await result
        if timeout_secs is not None and (took := time.monotonic() - started) > timeout_secs:
            raise TimeoutError(f"the handler took {took:.1f} s, its timeout is {timeout_secs:g} s")
        return result

    return call


def in_process(processes: Processes, timeout_secs: float | None) -> Caller:
    """A handler in a process, which is killed at the timeout."""

    async def call(job: Job[Any]) -> Any:
        try:
            return await processes.run(job, timeout_secs)
        except TimeoutError:
            raise TimeoutError(f"the handler was killed at its timeout of {timeout_secs:g} s") from None

    return call
