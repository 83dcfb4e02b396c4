"""Consumers for tests: in the test's own event loop, or in processes that a test may kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.waiting import until
from tampu.engine.config import ConsumerConfig
from tampu.engine.consumer import Consumer
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.proxy import Link, Proxy

QUEUE = "q"

#: Short waits, so that tests are; everything else as it is by default.
QUICK: dict[str, Any] = {
    "queue_name": QUEUE,
    "claim_min_idle_ms": 400,
    "concurrency": 8,
    "delayed_poll_interval_ms": 20,
    "retry": RetryConfig(initial_backoff_ms=1, max_backoff_ms=20, jitter_ms=0),
    "run_scheduler": False,
    "shutdown_deadline_secs": 5,
}


def quick_config(**changes: Any) -> ConsumerConfig:
    return ConsumerConfig(**(QUICK | changes))


@dataclass
class Working:
    """A consumer that runs in the test's event loop."""

    consumer: Consumer
    config: ConsumerConfig
    shutdown: asyncio.Event
    task: asyncio.Task[None]

    @property
    def running(self) -> Any:
        """Its inner parts."""
        return self.consumer._running

    async def is_up(self) -> None:
        """Returns when it is connected and waits for entries."""
        await until(lambda: self.running and self.running._read_pipe.connection, "it is connected")
        connection = self.running._read_pipe.connection
        await until(lambda: connection._waiting, "it waits for entries")

    async def link(self, proxy: Proxy, pipe: str) -> Link:
        """Its connection over a proxy: that of `_pipe` or of `_read_pipe`."""
        await self.is_up()
        transport = getattr(self.running, pipe).connection._transport
        port = transport.get_extra_info("sockname")[1]
        return next(link for link in proxy.links if link.client.get_extra_info("peername")[1] == port)

    async def stop(self) -> None:
        self.shutdown.set()
        await self.task


@contextlib.asynccontextmanager
async def consuming(
    url: str,
    handler: Callable[[Any], Any],
    *,
    process: bool = False,
    timeout_secs: float | None = None,
    **changes: Any,
) -> AsyncIterator[Working]:
    """`async with consuming(server.url, handler, concurrency=2) as worker:`; stopped in the end."""
    config = quick_config(**changes)
    consumer = Consumer(url, config)
    shutdown = asyncio.Event()
    task = asyncio.create_task(consumer.run(handler, shutdown, process=process, timeout_secs=timeout_secs))
    working = Working(consumer, config, shutdown, task)
    try:
        yield working
    finally:
        shutdown.set()
        await asyncio.wait({task}, timeout=60)
        if not task.cancelled():  # a test may have done that
            task.result()


# --- workers in processes of their own


@dataclass
class Journal:
    """A file to which handlers in any process append what they did; it survives their death."""

    path: Path

    def write(self, *words: object) -> None:
        line = " ".join(map(str, words)) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def lines(self) -> list[list[str]]:
        if not self.path.exists():
            return []
        return [line.split(" ") for line in self.path.read_text().splitlines()]

    def of(self, what: str) -> list[str]:
        """The second words of lines whose first word is `what`: job ids, mostly."""
        return [words[1] for words in self.lines() if words[0] == what]


@dataclass
class WorkerProcess:
    """A worker in a process of its own: `handler` is the name of a function in `consumer.process_worker`."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """SIGKILL, and collect it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, timeout_secs: float = 30) -> int:
        """SIGTERM, and wait for its end."""
        self.process.terminate()
        return self.process.wait(timeout_secs)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """Its log."""
        return self.log.read_text()


@dataclass
class Fleet:
    """Starts worker processes and ends those that are left."""

    folder: Path
    members: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder / "journal")

    def start(self, url: str, handler: str, **changes: Any) -> WorkerProcess:
        plan = {"url": url, "handler": handler, "config": changes}
        log = self.folder / f"worker-{len(self.members)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "consumer.process_worker", json.dumps(plan)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent.parent,
                env=os.environ | {"TAMPU_TEST_JOURNAL": str(self.journal.path)},
            )
        member = WorkerProcess(process, log)
        self.members.append(member)
        return member

    def end(self) -> None:
        for member in self.members:
            member.kill()


@contextlib.contextmanager
def fleet_in(folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.end()
