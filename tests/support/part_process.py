"""Runs a promoter or a scheduler until SIGTERM: `python part_process.py promoter URL '{"queue_name": "q"}' ''`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any

from tampu import Promoter, PromoterConfig, Scheduler, SchedulerConfig
from tampu.redis.client import Client


def end_with_the_test_run() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def pause_before(script_name: str) -> None:
    """Stop this process just before the first call of a script, after it has read everything the call depends on."""
    run = Client.run
    has_paused = False

    async def run_or_pause(self: Client, script: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal has_paused
        if script.name == script_name and not has_paused:
            has_paused = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return await run(self, script, *arguments, **options)

    Client.run = run_or_pause  # type: ignore[method-assign]


async def main(part: str, url: str, config: dict[str, Any]) -> None:
    shutdown = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.set)
    if part == "promoter":
        await Promoter(url, PromoterConfig(**config)).run(shutdown)
    else:
        await Scheduler(url, SchedulerConfig(**config)).run(shutdown)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_test_run, daemon=True).start()
    if sys.argv[4]:
        pause_before(sys.argv[4])
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
