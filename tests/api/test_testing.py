"""`tampu.testing` in a separate pytest run, as in a user's project, and without pytest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from docs.doc_pages import is_installed_as_plugin
from tampu import Job, JobFailed, Queue, Retry
from tampu.testing import run_until_empty

if TYPE_CHECKING:
    from servers.process import Server

PROJECT = Path(__file__).parents[2]

SUITE = """
import asyncio
import pytest
from tampu import Queue
from tampu.testing import run_until_empty

names = set()


def test_a_queue_without_an_event_loop(tampu_queue, tampu_server):
    done = []

    @tampu_queue.task
    def work(number: int) -> None:
        done.append(number)

    names.add(tampu_queue.name)
    for number in range(3):
        work.sync.add(number)
    assert asyncio.run(run_until_empty(tampu_queue)) == 3
    assert sorted(done) == [0, 1, 2]
    assert tampu_server.is_running


async def test_a_queue_with_one(tampu_queue):
    @tampu_queue.task
    async def work() -> str:
        return "done"

    names.add(tampu_queue.name)
    job = await work.add()
    await run_until_empty(tampu_queue)
    assert await job.result(5) == "done"


async def test_each_test_has_its_own_queue(tampu_queue, tampu_server):
    import redis

    assert tampu_queue.name not in names and len(names) == 2
    client = redis.Redis.from_url(tampu_server.url)
    assert client.keys("*test-*") == []
    assert Queue("x", url="embedded://").url == "embedded://"
    await tampu_queue.add("left behind", 1)


app_queue = Queue("app", url="embedded://")


@app_queue.task(attempts=1)
async def charge(fails: bool) -> None:
    if fails:
        raise ValueError


@pytest.mark.parametrize("_", range(2))
async def test_an_applications_queue_is_empty_in_every_test(tampu_clean, _):
    assert await app_queue.get_repeatable_jobs() == []
    assert await app_queue.peek_dlq() == []
    assert (await charge.add_unique("order-7", False)).id.is_new
    assert await run_until_empty(app_queue) == 1
    await charge.every(3600, {"fails": True})
    await charge.add(True)
    assert await run_until_empty(app_queue, raise_errors=False) == 1
    await charge.add_in(3600, False)


def test_synchronous_code_starts_empty_too(tampu_clean):
    assert charge.sync.add_unique("order-7", False).id.is_new
    assert asyncio.run(run_until_empty(app_queue)) == 1


def test_nothing_is_left_behind(tampu_server):
    import redis

    assert redis.Redis.from_url(tampu_server.url).keys("*test-*") == []
"""


def test_the_fixtures_work_in_a_project(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    plugin = [] if is_installed_as_plugin() else ["-p", "tampu.testing"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--basetemp=inner", *plugin],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "7 passed" in done.stdout, done.stdout + done.stderr


def test_the_package_declares_the_plugin() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"tampu": "tampu.testing"}


def test_it_can_be_imported_without_pytest() -> None:
    script = (
        "import sys; sys.modules['pytest'] = None; import tampu.testing; print(tampu.testing.run_until_empty.__name__)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "run_until_empty\n"


async def test_jobs_added_by_jobs_are_run_too(queue: Queue, server: Server) -> None:
    done: list[int] = []

    @queue.task
    async def work(depth: int) -> None:
        done.append(depth)
        if depth < 5:
            await work.add(depth + 1)
            await work.add_in(0.01, 99)

    await work.add(0)
    ran = await run_until_empty(queue)
    assert [depth for depth in done if depth != 99] == [0, 1, 2, 3, 4, 5]
    assert ran == len(done)
    assert server.client().xlen(queue.keys.stream) == 0


async def test_delayed_jobs_are_left_or_run_at_once(queue: Queue) -> None:
    done: list[str] = []

    @queue.task(backoff=timedelta(seconds=3600))
    async def work(name: str) -> Any:
        done.append(name)
        return Retry(after=3600) if len(done) == 2 else None

    await work.add_in(3600, "later")
    await work.add("now")
    assert await run_until_empty(queue) == 1
    assert done == ["now"]
    assert await run_until_empty(queue, include_delayed=True) == 2  # the job and its retry
    assert done == ["now", "later", "later"]


async def test_a_dead_lettered_job_raises_its_own_error(queue: Queue) -> None:
    @queue.task(attempts=2, backoff=timedelta(seconds=3600))
    async def work() -> None:
        raise ZeroDivisionError("in the task")

    await work.add()
    with pytest.raises(ZeroDivisionError, match="in the task") as caught:
        await run_until_empty(queue)
    assert "work" in str(caught.traceback[-1])
    await work.add()
    assert await run_until_empty(queue, raise_errors=False) == 2
    assert len(await queue.peek_dlq()) == 2
    assert await run_until_empty(queue) == 0  # earlier dead letters are ignored


async def test_a_malformed_job_raises_too(queue: Queue, server: Server) -> None:
    @queue.task
    async def work() -> None: ...

    server.client().xadd(queue.keys.stream, {"not": "a job"})
    with pytest.raises(JobFailed, match="malformed"):
        await run_until_empty(queue)


async def test_an_error_fixed_by_a_retry_is_not_raised(queue: Queue) -> None:
    @queue.task(backoff=timedelta(seconds=3600))
    async def work() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError

    attempts: list[int] = []
    await work.add()
    assert await run_until_empty(queue) == 3


async def test_it_serves_several_queues_and_handlers(server: Server) -> None:
    async with Queue("a", url=server.url) as a, Queue("b", url=server.url) as b:
        seen: list[Any] = []

        async def handler(job: Job[Any]) -> None:
            seen.append(job.data)
            if job.data == 1:
                await b.add("", 2)

        await a.add("", 1)
        assert await run_until_empty(a, b, handler=handler) == 2
        assert seen == [1, 2]


async def test_a_timeout_names_the_queue(queue: Queue) -> None:
    @queue.task
    async def work() -> None:
        await asyncio.sleep(3600)

    await work.add()
    with pytest.raises(TimeoutError, match=r"jobs are left in q after 0\.1 s"):
        await run_until_empty(queue, timeout=0.1, shutdown_deadline_secs=0)


async def test_a_paused_queue_is_not_waited_for(queue: Queue) -> None:
    @queue.task
    async def work() -> None: ...

    await queue.pause()
    await work.add()
    assert await run_until_empty(queue) == 0


async def test_schedules_that_are_due_are_fired_if_asked_for(queue: Queue, server: Server) -> None:
    fired: list[str] = []

    @queue.task
    async def report(kind: str) -> None:
        fired.append(kind)

    await report.every(3600, {"kind": "hourly"}, key="hourly")
    await report.cron("0 9 * * *", {"kind": "daily"}, key="daily")
    assert await run_until_empty(queue, run_scheduler=True) == 0  # none is due
    server.client().zadd(queue.keys.repeat, {"hourly": int(time.time() * 1000) - 5})
    assert await run_until_empty(queue) == 0  # not asked for
    assert await run_until_empty(queue, run_scheduler=True) == 1
    assert fired == ["hourly"]
    assert await run_until_empty(queue, run_scheduler=True, include_delayed=True) == 2
    assert sorted(fired) == ["daily", "hourly", "hourly"]
    assert len(await queue.get_repeatable_jobs()) == 2
