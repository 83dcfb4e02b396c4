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

from support.lines import whole_lines
from support.queues import flat_fields
from support.waiting import until
from tampu.config import ConsumerConfig
from tampu.consume.consumer import Consumer
from tampu.wire.retry import RetryConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from consume.views import WorkerView
    from support.proxy import Link, Proxy
    from tampu.wire.job import Job

QUEUE = "q"

#: Short waits, to keep tests fast; everything else has its default.
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
    shutdown: asyncio.Event
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.shutdown.set()
        await self.task

    # --- state that the server does not show: the only place in the tests that knows the consumer's parts

    @property
    def _runtime(self) -> Any:
        return self.consumer._running

    @property
    def config(self) -> ConsumerConfig:
        """Return its settings; `consumer_id` is the name on the wire."""
        config: ConsumerConfig = self._runtime.config
        return config

    @property
    def queue(self) -> Any:
        return self._runtime.queues[0]

    @property
    def held(self) -> int:
        """Return the number of entries in flight: delivered and not yet settled, handed back or lost."""
        return len(self.queue.inflight)

    @property
    def occupied(self) -> int:
        """Return the number of entries that run or wait in its pool."""
        return self._runtime.pool.occupied

    @property
    def running(self) -> int:
        """Return the number of handlers that run or wait until their outcome fits."""
        return self._runtime.pool.running

    @property
    def is_connected(self) -> bool:
        """Return True if it has a connection for reading or for settling."""
        (link,) = self._runtime.links
        return any(client.connection is not None for client in (link.read_client, link.client))

    def take_in(self, view: WorkerView, count: int, earlier_deliveries: int = 0) -> list[bytes]:
        """Deliver the next entries to it and let them wait, as if it had read ahead. Return their entry ids."""
        raw = view.client.execute_command(
            *("XREADGROUP", "GROUP", self.config.group, self.config.consumer_id, "COUNT", count),
            *("STREAMS", view.keys.stream, ">"),
            NEVER_DECODE=[],
        )
        entries = raw[view.keys.stream.encode()] if isinstance(raw, dict) else raw[0][1]
        assert len(entries) == count
        receive = self.queue.inflight.receive
        for entry_id, fields in entries:
            delivery = receive(entry_id, flat_fields(fields), earlier_deliveries)
            self._runtime.pool.put(self.queue, [delivery])
        return [entry_id for entry_id, _ in entries]

    async def stop_renewing(self) -> None:
        """Stop renewing its leases without the consumer noticing."""
        await self._runtime._lease_thread.stop()
        self.queue.leases.valid_until_ns = 1 << 62


class Stuck:
    """A handler that records started jobs and waits for `release`; with `only`, it waits for this payload alone."""

    def __init__(self, only: Any = ...) -> None:
        self.only = only
        self.started: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, job: Job[Any]) -> None:
        self.started.append(job.id)
        if self.only in (..., job.payload):
            await self.release.wait()

    async def runs(self) -> None:
        """Wait until the first job has started."""
        await until(lambda: self.started, "it runs")


async def reading_link(proxy: Proxy) -> Link:
    """Return the connection over which a worker waits for entries, once nothing but its read is unanswered."""
    return await _link(
        proxy, lambda link: link.commands[-1:] == [b"XREADGROUP"] and link.unanswered == 1, "a worker reads"
    )


async def settling_link(proxy: Proxy) -> Link:
    """Return the connection over which a worker does everything but read."""
    return await _link(proxy, lambda link: b"XGROUP" in link.commands, "a worker has created its group")


async def _link(proxy: Proxy, is_it: Callable[[Link], bool], what: str) -> Link:
    return await until(lambda: next((link for link in proxy.links if not link.is_cut and is_it(link)), None), what)


@contextlib.asynccontextmanager
async def consuming(
    url: str,
    handler: Callable[[Any], Any],
    *,
    process: bool = False,
    timeout_secs: float | None = None,
    **changes: Any,
) -> AsyncIterator[Working]:
    """Run a consumer: `async with consuming(server.url, handler, concurrency=2) as worker:`."""
    consumer = Consumer(url, quick_config(**changes))
    shutdown = asyncio.Event()
    task = asyncio.create_task(consumer.run(handler, shutdown, process=process, timeout_secs=timeout_secs))
    working = Working(consumer, shutdown, task)
    try:
        yield working
    finally:
        shutdown.set()
        await asyncio.wait({task}, timeout=60)
        if not task.cancelled():  # a test may have done that
            task.result()


# --- workers in separate processes


@dataclass
class Journal:
    """A file to which handlers in any process append lines; it survives their death."""

    path: Path

    def write(self, *words: object) -> None:
        line = " ".join(map(str, words)) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def lines(self) -> list[list[str]]:
        return [line.split(" ") for line in whole_lines(self.path)]

    def of(self, what: str) -> list[str]:
        """Return the second word, mostly a job id, of lines that start with `what`."""
        return [words[1] for words in self.lines() if words[0] == what]


@dataclass
class WorkerProcess:
    """A worker in a separate process. `handler` is the name of a function in `consume.process_worker`."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kill it with SIGKILL and reap it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, timeout_secs: float = 30) -> int:
        """Stop it with SIGTERM and wait for its end."""
        self.process.terminate()
        return self.process.wait(timeout_secs)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """Return its log."""
        return self.log.read_text()


@dataclass
class Fleet:
    """Starts worker processes and ends the remaining ones."""

    folder: Path
    members: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder / "journal")

    def start(self, url: str, handler: str, **changes: Any) -> WorkerProcess:
        plan = {"url": url, "handler": handler, "config": changes}
        log = self.folder / f"worker-{len(self.members)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "consume.process_worker", json.dumps(plan)],
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
