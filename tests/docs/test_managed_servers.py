"""`docs/how-to/managed-servers.md`: nothing depends on the commands that managed servers restrict."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import run_program
from docs.doc_pages import DOCS
from support.waiting import until
from tampu import JobFailed, Queue, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (DOCS / "how-to" / "managed-servers.md").read_text()


def restricted_commands() -> list[str]:
    """The commands in the two lists of the page."""
    section = PAGE.split("## Commands that services restrict", 1)[1].split("\n## ", 1)[0]
    return [
        command
        for block in re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        for command in block.split()
    ]


@pytest.fixture
def managed(fresh_server: Callable[..., Any]) -> Any:
    """A server like those of the page: a user without the restricted commands, and the policy that most begin with."""
    server = fresh_server("redis86", **{"maxmemory-policy": "volatile-lru", "maxmemory": "100mb"})
    commands = restricted_commands()
    assert len(commands) > 15
    user = ["on", ">secret", "~*", "&*", "+@all", *(f"-{command}" for command in commands)]
    server.client().execute_command("ACL", "SETUSER", "app", *user)
    return server


async def test_workers_need_none_of_the_restricted_commands(managed: Any) -> None:
    managed.client().acl_log_reset()
    url = managed.url.replace("redis://", "redis://app:secret@")
    async with Queue("q", url=url) as queue:

        @queue.task(attempts=2, backoff=timedelta(milliseconds=1))
        async def work(fails: bool = False) -> str:
            if fails:
                raise ValueError("no")
            return "done"

        await work.every(3600)
        worker = Worker(queue, delayed_poll_interval_ms=20)
        running = asyncio.create_task(worker.run())
        assert await (await work.add()).result(20) == "done"
        assert await (await work.add_in(0.05)).result(20) == "done"
        with pytest.raises(JobFailed):
            await (await work.add(fails=True)).result(20)
        await until(lambda: managed.client().info("clients")["blocked_clients"], "the worker waits for jobs")
        started = time.monotonic()
        await worker.close()
        await running
        assert time.monotonic() - started < 4  # a read waits for 5 s, and cannot be ended by CLIENT UNBLOCK
    assert {entry["object"] for entry in managed.client().acl_log()} <= {"client|unblock"}


def test_doctor_says_what_the_page_shows(managed: Any) -> None:
    done = run_program("doctor", "--url", managed.url.replace("redis://", "redis://app:secret@"))
    assert done.code == 3, done.err
    shown = re.search(r"`tampu doctor` prints.*?```\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    said = " ".join(done.out.split())
    for line in shown[1].splitlines():
        assert " ".join(line.split()) in said
