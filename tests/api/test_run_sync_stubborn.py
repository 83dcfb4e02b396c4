"""`Worker.run_sync` returns in time, even if handlers ignore their cancellation."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from tampu import Worker

if TYPE_CHECKING:
    from servers.process import Server
    from tampu import Queue

SCRIPT = textwrap.dedent(
    """
    import asyncio, sys
    from tampu import Queue, Worker
    queue = Queue("q", url=sys.argv[1])

    @queue.task
    async def stubborn() -> None:
        print("started", flush=True)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    worker = Worker(queue, shutdown_deadline_secs=1)
    worker.run_sync()
    print("returned", worker.abandoned, flush=True)
    """
)


async def test_run_sync_refuses_to_run_inside_an_event_loop(queue: Queue) -> None:
    worker = Worker("q", lambda job: None, url=queue.url)
    with pytest.raises(RuntimeError, match="running event loop"):
        worker.run_sync()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_handler_that_ignores_its_cancellation_is_abandoned(
    queue: Queue, server: Server, number: signal.Signals
) -> None:
    await queue.add("stubborn", {})
    command = [sys.executable, "-c", SCRIPT, server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            began = time.monotonic()
            process.send_signal(number)
            out, err = process.communicate(timeout=15)
            assert time.monotonic() - began < 10  # the deadline, the time to clean up, and a margin
        finally:
            process.kill()
    assert out == "returned 1\n"
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "destroyed" not in err
