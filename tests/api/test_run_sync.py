"""`Worker(queue).run_sync()` in a script without an event loop, stopped by signals."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from typing import IO, TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.process import Server
    from tampu import Queue

SCRIPT = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from tampu import Queue, Worker
    queue = Queue("q", url=sys.argv[1])

    @queue.task
    async def slow(seconds: float) -> None:
        print("started", flush=True)
        await asyncio.sleep(seconds)
        print("finished", flush=True)

    @queue.task
    async def signal_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not worker.is_closed:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print("finished", flush=True)

    worker = Worker(
        queue, on_startup=lambda: print("up", flush=True), on_shutdown=lambda: print("down", flush=True)
    )
    worker.run_sync()
    print("returned", flush=True)
    """
)


@pytest.fixture
def script(server: Server) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def lines(stream: IO[str] | None, until: str) -> list[str]:
    assert stream is not None
    seen: list[str] = []
    while not seen or seen[-1] != until:
        line = stream.readline()
        assert line, f"it ended before it printed {until!r}"
        seen.append(line.rstrip())
    return seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_worker(queue: Queue, script: Any, number: signal.Signals) -> None:
    await queue.add("slow", {"seconds": 0.5})
    assert lines(script.stdout, "started") == ["up", "started"]
    script.send_signal(number)
    assert script.communicate(timeout=30) == ("finished\ndown\nreturned\n", "")
    assert script.returncode == 0


async def test_a_signal_that_is_sent_twice_counts_once(queue: Queue, script: Any) -> None:
    """`timeout` signals its program and then the program's process group."""
    await queue.add("signal_twice", {})
    assert script.communicate(timeout=30) == ("up\nfinished\ndown\nreturned\n", "")
    assert script.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, None)])
async def test_a_second_signal_ends_the_process_at_once(
    queue: Queue, script: Any, number: signal.Signals, code: int | None
) -> None:
    job = await queue.add("slow", {"seconds": 3600})
    lines(script.stdout, "started")
    script.send_signal(number)
    for _ in range(50):  # ten seconds; the shutdown deadline is thirty
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.wait(0.2)
            break
        script.send_signal(number)
    else:
        pytest.fail("it waits for running jobs")
    assert script.returncode != 0
    assert code is None or script.returncode == code
    # Another worker retries it: when its lease expires or, if there was time to record the failure, as a retry.
    assert (await queue.get_job(job.id)).state in ("running", "delayed", "waiting")
