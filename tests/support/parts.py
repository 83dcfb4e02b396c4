"""Runs parts of tampu in the test's own event loop, or in a separate process that can be killed or paused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from servers.process import eventually
from tampu.config import ConsumerConfig
from tampu.consume.consumer import Consumer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from types import TracebackType

#: How long a part may take to stop, in seconds; normally it takes milliseconds.
STOP_SECS = 20.0


class Part(Protocol):
    """A promoter or a scheduler."""

    def run(self, shutdown: asyncio.Event) -> Coroutine[Any, Any, None]: ...


@contextlib.asynccontextmanager
async def running(*parts: Part) -> AsyncIterator[asyncio.Event]:
    """Run parts until the block ends or the event is set: `async with running(Promoter(url, config)):`."""
    async with _running(*(part.run for part in parts)) as shutdown:
        yield shutdown


@contextlib.asynccontextmanager
async def consuming(url: str, handler: Callable[..., Any], **config: Any) -> AsyncIterator[asyncio.Event]:
    """Run a consumer with default settings until the block ends; `consume.workers` has one with short intervals."""
    consumer = Consumer(url, ConsumerConfig(**{"shutdown_deadline_secs": 2, "block_ms": 1000} | config))
    async with _running(partial(consumer.run, handler)) as shutdown:
        yield shutdown


@contextlib.asynccontextmanager
async def _running(*runs: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> AsyncIterator[asyncio.Event]:
    shutdown = asyncio.Event()
    tasks = [asyncio.create_task(run(shutdown)) for run in runs]
    try:
        yield shutdown
    finally:
        shutdown.set()
        await asyncio.wait_for(asyncio.gather(*tasks), STOP_SECS)


class PartProcess:
    """Runs a part in a separate process: `with PartProcess("promoter", url, queue_name="q"):`.

    With `pause_before="fire"`, it stops itself (SIGSTOP) just before it calls that script for the first time.
    """

    def __init__(self, part: str, url: str, *, pause_before: str = "", **config: Any) -> None:
        script = Path(__file__).with_name("part_process.py")
        command = [sys.executable, str(script), part, url, json.dumps(config), pause_before]
        # Its stdin closes when this process ends, so it does not outlive a killed test run.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_paused(self) -> bool:
        """True while it is stopped, by itself or by `pause`."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "Tt"

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_SECS)

    def terminate(self) -> int:
        """Send SIGTERM, on which it shuts down cleanly; return its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_SECS)

    def until_paused(self) -> None:
        eventually(lambda: self.is_paused, "the process has paused itself")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_SECS)
        if self.process.stdin is not None:
            self.process.stdin.close()
