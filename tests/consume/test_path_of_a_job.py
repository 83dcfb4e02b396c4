"""The way of one job through the code, from `task.add` to its acknowledgement, is short enough to be read."""

from __future__ import annotations

import asyncio
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tampu
from support.waiting import until
from tampu import Queue, Worker

if TYPE_CHECKING:
    from types import FrameType

    from servers.process import Server

CEILINGS = tomllib.loads((Path(__file__).parents[2] / ".ci" / "ceilings.toml").read_text())
SOURCE = os.path.dirname(tampu.__file__) + os.sep


class Recording:
    """The files of src/ that are entered while it records, and the calls from one of them to another."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.hops: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(SOURCE):
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            self.files.add(file.removeprefix(SOURCE))
            if caller != file:
                self.hops.append((caller.removeprefix(SOURCE), file.removeprefix(SOURCE)))


@pytest.mark.untraced
async def test_the_path_of_a_job_is_short(server: Server) -> None:
    queue = Queue("q", url=server.url)

    @queue.task
    async def work(number: int) -> None:
        pass

    client = server.client()
    recordings: list[Recording] = []
    async with queue, Worker(queue, run_scheduler=False):
        for number in range(30):  # the first ones open connections; in others, a background loop may run
            recording = Recording()
            sys.setprofile(recording)
            await work.add(number)
            await until(lambda: client.xlen(queue.keys.stream) == 0, "it is settled")
            sys.setprofile(None)
            recordings.append(recording)
            await asyncio.sleep(0)
    shortest = min(recordings, key=lambda recording: len(recording.hops))
    assert len(shortest.files) <= CEILINGS["path_files"], sorted(shortest.files)
    assert len(shortest.hops) <= CEILINGS["path_hops"], shortest.hops
