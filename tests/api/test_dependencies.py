"""Dependencies: parameters that a worker provides, opened before the run and closed after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator  # noqa: TC003 - resolved at runtime
from typing import TYPE_CHECKING, Annotated

import pytest

from api.workers import working
from tampu import ConfigError, Depends, JobFailed, Queue
from tampu.testing import override, run_until_empty

if TYPE_CHECKING:
    from servers.process import Server

steps: list[str] = []


@pytest.fixture(autouse=True)
def no_steps() -> None:
    steps.clear()


def session() -> Iterator[str]:
    steps.append("open")
    try:
        yield "session"
    except Exception as error:
        steps.append(f"roll back after {error}")
        raise
    finally:
        steps.append("close")


async def client() -> AsyncIterator[str]:
    steps.append("open client")
    yield "client"
    steps.append("close client")


async def settings() -> str:
    return "settings"


def repository(db: str = Depends(session), config: str = Depends(settings)) -> str:
    return f"repository of {db} with {config}"


def pool() -> Iterator[str]:
    steps.append("open pool")
    yield "pool"
    steps.append("close pool")


Session = Annotated[str, Depends(session)]


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_dependencies_are_opened_for_each_run_and_closed_after_it(queue: Queue, kind: str) -> None:
    if kind == "def":

        @queue.task(attempts=1)
        def work(number: int, *, db: str = Depends(session), http: str = Depends(client)) -> str:
            steps.append("run")
            return f"{1 // number} {db} {http}"
    else:

        @queue.task(attempts=1)  # type: ignore[no-redef]
        async def work(number: int, *, db: str = Depends(session), http: str = Depends(client)) -> str:
            steps.append("run")
            return f"{1 // number} {db} {http}"

    async with working(queue):
        assert await (await work.add(1)).result(10) == "1 session client"
        assert sorted(steps[:2]) == ["open", "open client"]
        assert steps[2] == "run"
        assert sorted(steps[3:]) == ["close", "close client"]
        steps.clear()
        with pytest.raises(JobFailed, match="ZeroDivisionError"):
            await (await work.add(0)).result(10)
        assert "roll back after integer division or modulo by zero" in steps


async def test_dependencies_of_dependencies_are_opened_once(queue: Queue) -> None:
    @queue.task
    async def work(*, db: Session, found: Annotated[str, Depends(repository)]) -> str:
        return f"{db}, {found}"

    async with working(queue):
        job = await queue.add("work", {})
        assert await job.result(10) == "session, repository of session with settings"
    assert steps == ["open", "close"]


async def test_a_def_task_gets_its_session_in_its_own_thread(queue: Queue) -> None:
    def here() -> Iterator[int]:
        ident = threading.get_ident()
        yield ident
        steps.append(str(threading.get_ident() == ident))

    @queue.task
    def work(*, opened: int = Depends(here)) -> bool:
        return opened == threading.get_ident() != main

    main = threading.get_ident()
    async with working(queue):
        assert await (await work.add()).result(10) is True
    assert steps == ["True"]


async def test_one_per_worker_is_opened_once_and_closed_at_the_end(queue: Queue) -> None:
    @queue.task
    async def work(*, shared: str = Depends(pool, per="worker")) -> str:
        return shared

    @queue.task
    def work_in_thread(*, shared: str = Depends(pool, per="worker")) -> str:
        return shared

    async with working(queue):
        jobs = [await task.add() for task in (work, work_in_thread) for _ in range(5)]
        assert {await job.result(10) for job in jobs} == {"pool"}
        assert steps == ["open pool"]
    assert steps == ["open pool", "close pool"]


async def test_one_per_worker_that_cannot_be_opened_is_tried_again(queue: Queue) -> None:
    def flaky() -> str:
        steps.append("try")
        if len(steps) == 1:
            raise ConnectionError("no database")
        return "there"

    @queue.task(attempts=2)
    async def work(*, shared: str = Depends(flaky, per="worker")) -> str:
        return shared

    async with working(queue):
        assert await (await work.add()).result(10) == "there"


async def test_a_caller_cannot_pass_a_dependency(queue: Queue, server: Server) -> None:
    @queue.task
    async def work(to: str, *, db: str = Depends(session)) -> str:
        return f"{to} {db}"

    @queue.task
    async def open_ended(*, db: str = Depends(session), **rest: int) -> str:
        return f"{db} {rest}"

    with pytest.raises(TypeError, match="unexpected keyword argument 'db'"):
        await work.add("ada", db="mine")
    with pytest.raises(TypeError, match="'db' is provided by the worker"):
        await open_ended.add(db="mine")
    async with Queue("q", url=server.url) as other:
        forged = [await other.add(name, {"to": "ada", "db": "mine"}) for name in ("work", "open_ended")]
    async with working(queue):
        assert await queue.wait_for_result(forged[0].id) == "ada session"
        assert "mine" not in (await queue.wait_for_result(forged[1].id)).partition(" ")[0]
    assert (await queue.get_job(forged[0].id)).state == "done"
    seen: list[object] = []
    await work.add("eve")
    await run_until_empty(queue, before_job=lambda job: seen.append(job.payload))
    assert seen == [{"to": "eve"}]


async def test_a_test_overrides_a_dependency_or_passes_it(queue: Queue) -> None:
    @queue.task
    async def work(*, db: str = Depends(session)) -> str:
        return db

    assert await work(db="passed") == "passed"
    with pytest.raises(TypeError, match="pass db: "):
        await work()
    async with working(queue):
        with override(session, lambda: "fake"):
            assert await (await work.add()).result(10) == "fake"
        assert await (await work.add()).result(10) == "session"


async def test_it_is_closed_after_a_timeout_and_after_a_cancel(queue: Queue) -> None:
    @queue.task(timeout=0.05, attempts=1)
    async def too_long(*, db: str = Depends(session)) -> None:
        await asyncio.Event().wait()

    async with working(queue):
        with pytest.raises(JobFailed, match="timeout"):
            await (await too_long.add()).result(10)
    assert (steps[0], steps[-1]) == ("open", "close")


async def test_an_error_while_closing_fails_the_run(queue: Queue) -> None:
    def commits() -> Iterator[None]:
        yield
        raise ConnectionError("the commit failed")

    @queue.task(attempts=1)
    def work(*, db: None = Depends(commits)) -> None: ...

    async with working(queue):
        with pytest.raises(JobFailed, match="the commit failed"):
            await (await work.add()).result(10)


def test_what_cannot_be_provided_is_refused() -> None:
    with pytest.raises(ConfigError, match="provider must be a function"):
        Depends("session")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="per must be"):
        Depends(session, per="day")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="repository lives as long as a worker, so it cannot depend on session"):
        Depends(repository, per="worker")
