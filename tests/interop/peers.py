"""Programs of other implementations, each a separate process that speaks lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.require import unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = Path(__file__).parent
#: Timeout for a line of output; the peers' own timers take up to a second.
PATIENCE_SECS = 30.0


@cache
def chasquimq_python() -> str:
    """Return the Python of a virtual environment with chasquimq 1.3.0, installed at the first call."""
    installer = HERE.parents[1] / "scripts" / "install_peers.py"
    done = subprocess.run([sys.executable, str(installer)], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        unavailable("chasquimq 1.3.0", f"run `python scripts/install_peers.py` where packages can be had ({reason})")
    return done.stdout.strip()


class Program:
    """A running peer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> Any:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECS):
            line = await self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise AssertionError(f"the peer ended: {(await self._process.stderr.read()).decode()}")
        return json.loads(line)

    async def lines(self, count: int) -> list[Any]:
        return [await self.line() for _ in range(count)]

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the queue."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments, options]).encode() + b"\n")
        return (await self.line())["result"]

    async def stop(self) -> None:
        """Stop it gracefully."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECS):
                await self._process.communicate()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@contextlib.asynccontextmanager
async def run_program(name: str, *arguments: str) -> AsyncIterator[Program]:
    process = await asyncio.create_subprocess_exec(
        chasquimq_python(),
        str(HERE / name),
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        limit=2**24,
    )
    program = Program(process)
    try:
        assert await program.line() == {"ready": True}
        yield program
    finally:
        await program.stop()


@contextlib.asynccontextmanager
async def chasquimq_worker(url: str, queue: str = "q", **options: Any) -> AsyncIterator[Program]:
    """Start the real worker; it prints a line for each run of its handler."""
    async with run_program("chasquimq_worker.py", url, queue, json.dumps(options)) as program:
        yield program


@contextlib.asynccontextmanager
async def chasquimq_queue(url: str, queue: str = "q") -> AsyncIterator[Program]:
    """Start the real queue; `call` its methods."""
    async with run_program("chasquimq_queue.py", url, queue) as program:
        yield program
