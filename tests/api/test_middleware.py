"""Middleware: around adds and runs, also in processes, and a call at every end of a job."""

from __future__ import annotations

import asyncio
import sys
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from api.workers import working
from support.waiting import until
from tampu import (
    ConfigError,
    JobCancelled,
    JobEnd,
    JobFailed,
    Middleware,
    PendingAdd,
    Queue,
    Snooze,
    Worker,
    current_job,
)
from tampu.testing import run_until_empty

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.process import Server
    from tampu.middleware import NextAdd, NextRun
    from tampu.wire.job import Job, JobId

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


class Tenant(Middleware):
    async def on_add(self, call_next: NextAdd, add: PendingAdd) -> list[JobId]:
        add.headers.setdefault("tenant", tenant.get())
        return await call_next(add)

    async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
        tenant.set(job.headers["tenant"])
        return await call_next(job)


class Noting(Middleware):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.adds: list[tuple[str, list[Any]]] = []
        self.ends: list[JobEnd] = []

    async def on_add(self, call_next: NextAdd, add: PendingAdd) -> list[JobId]:
        self.adds.append((add.name, add.payloads))
        return await call_next(add)

    def on_end(self, end: JobEnd) -> None:
        self.ends.append(end)

    @property
    def kinds(self) -> list[str]:
        return [end.kind for end in self.ends]


@pytest.fixture
def acme() -> Iterator[None]:
    token = tenant.set("acme")
    yield
    tenant.reset(token)


async def test_context_travels_from_every_kind_of_add_to_the_run(server: Server, acme: None) -> None:
    async with Queue("q", url=server.url, middleware=[Tenant()], headers={"source": "web"}) as queue:

        @queue.task
        async def on_loop() -> str:
            return f"{tenant.get()} {current_job().headers['source']}"

        @queue.task
        def in_thread() -> str:
            return f"{tenant.get()} {current_job().headers['source']}"

        @queue.task(key=lambda to: to)
        def keyed(to: str) -> str:
            assert current_job().extras.key == to
            return f"{tenant.get()} {current_job().headers['source']}"

        async with working(queue):
            jobs: list[Any] = [
                await on_loop.add(),
                await in_thread.add(),
                await queue.add("on_loop", {}),
                *await queue.add_bulk([{"name": "on_loop", "data": {}}]),
                *await on_loop.add_bulk([{}, {}]),
                await on_loop.using(delay=0.01, unique="7").add(),
                *await keyed.add_bulk(["a", "b"]),
                await on_loop.using(debounce="9", quiet=0.01).add(),
                await on_loop.using(throttle="9", every=1).add(),
            ]
            tenant.set("zeta")
            own = await on_loop.using(headers={"source": "cli"}).add()
            assert [await job.result(10) for job in jobs] == ["acme web"] * 11
            assert await own.result(10) == "zeta cli"


def test_context_travels_from_synchronous_adds(server: Server, acme: None) -> None:
    queue = Queue("q", url=server.url, middleware=[Tenant()])
    queue.task(name="work")(lambda: None)
    seen: list[dict[str, str]] = []
    with queue.sync as sync:
        sync.add("work", {})

    async def run() -> None:
        async with queue:
            await run_until_empty(queue, before_job=lambda job: seen.append(job.headers))

    asyncio.run(run())
    assert seen == [{"tenant": "acme"}]


async def test_an_add_without_tasks_passes_the_middleware_too(server: Server) -> None:
    noting = Noting()
    async with Queue("q", url=server.url, middleware=[noting]) as queue:
        await queue.add_bulk([{"name": "a", "data": 1}, {"name": "b", "data": [2]}])
    assert noting.adds == [("a", [1]), ("b", [[2]])]


async def test_an_add_can_be_refused_and_must_be_answered(server: Server) -> None:
    class Refusing(Middleware):
        async def on_add(self, call_next: NextAdd, add: PendingAdd) -> list[JobId]:
            if add.payloads == [{"number": 1}]:
                raise PermissionError("not this one")
            return None  # type: ignore[return-value]  # the mistake

    async with Queue("q", url=server.url, middleware=[Refusing()]) as queue:

        @queue.task
        async def work(number: int) -> None: ...

        with pytest.raises(PermissionError):
            await work.add(1)
        with pytest.raises(ConfigError, match="on_add must return what call_next returns"):
            await work.add(2)
        assert await queue.jobs("waiting") == []


async def test_a_run_can_be_skipped_replaced_and_rescued(server: Server) -> None:
    ran: list[str] = []

    class Deciding(Middleware):
        async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
            if job.headers.get("skip"):
                return "skipped"
            try:
                return f"<{await call_next(job)}>"
            except ZeroDivisionError:
                return None

    async with Queue("q", url=server.url, middleware=[Deciding()]) as queue:

        @queue.task
        def work(number: int) -> str:
            ran.append("work")
            return str(1 // number)

        async with working(queue):
            assert await (await work.using(headers={"skip": "yes"}).add(1)).result(10) == "skipped"
            assert ran == []
            assert await (await work.add(1)).result(10) == "<1>"
            # An exception that is not raised again is a success with the result None, not a result that never comes.
            assert await (await work.add(0)).result(10) is None


async def test_every_end_is_reported_with_its_decision(server: Server) -> None:
    noting = Noting()
    async with Queue("q", url=server.url, middleware=[noting]) as queue:

        @queue.task(attempts=2, backoff=timedelta(milliseconds=10))
        async def fails() -> None:
            raise ValueError("no")

        @queue.task
        async def snoozes() -> Snooze | None:
            return Snooze(0.01) if len(noting.ends) == 2 else None

        async with working(queue):
            with pytest.raises(JobFailed):
                await (await fails.add()).result(10)
            retried, dead = noting.ends
            assert (retried.kind, retried.retry_in, retried.ran) == ("retried", 0.01, True)
            assert (dead.kind, dead.reason, dead.retry_in) == ("dead", "retries_exhausted", None)
            assert isinstance(dead.error, ValueError)
            await (await snoozes.add()).result(10)
            assert noting.kinds[2:] == ["snoozed", "succeeded"]
            assert (noting.ends[2].retry_in, noting.ends[3].queue) == (0.01, "q")
        expired = await snoozes.using(expires=0.001).add()
        cancelled = await snoozes.add()
        await queue.cancel(cancelled.id, reason="not wanted")
        async with working(queue):
            with pytest.raises(JobFailed):
                await expired.result(10)
            with pytest.raises(JobCancelled):
                await cancelled.result(10)
        ends = {end.kind: (end.job.id, end.reason, end.ran) for end in noting.ends[4:]}
        assert ends == {"dead": (expired.id, "expired", False), "cancelled": (cancelled.id, "not wanted", False)}


async def test_an_error_of_on_end_is_logged_and_changes_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Middleware):
        def on_end(self, end: JobEnd) -> None:
            raise RuntimeError("first")

    class LaterBroken(Middleware):
        async def on_end(self, end: JobEnd) -> None:
            raise RuntimeError("second")

    async with Queue("q", url=server.url, middleware=[Broken(), LaterBroken()]) as queue:

        @queue.task
        async def work() -> int:
            return 1

        async with working(queue):
            assert await (await work.add()).result(10) == 1
    assert caplog.text.count("on_end raised an exception") == 2


async def test_a_worker_that_stops_waits_for_on_end(server: Server) -> None:
    ended: list[str] = []

    class Slow(Middleware):
        async def on_end(self, end: JobEnd) -> None:
            await until(lambda: not worker.is_running or worker.is_closed, "the worker stops")
            ended.append(end.kind)

    async with Queue("q", url=server.url, middleware=[Slow()]) as queue:

        @queue.task
        async def work() -> None: ...

        async with working(queue) as worker:
            await (await work.add()).result(10)
            assert ended == []
    assert ended == ["succeeded"]


async def test_it_runs_in_the_process_of_a_process_task(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    monkeypatch.delitem(sys.modules, "api.process_tasks_around", raising=False)
    from api import process_tasks_around as module

    async with module.queue as queue, working(queue):
        # The middleware set the context in the process, where the dependencies of the task were opened too.
        assert await (await module.whose.add()).result(30) == ["acme", True, "open"]
        assert await (await module.whose_async.add()).result(30) == ["acme", True, "open"]
        with pytest.raises(JobFailed, match="replaced: closed after ValueError"):
            await (await module.fails.add()).result(30)


@pytest.mark.parametrize("wrong", [1, Middleware, "no"])
def test_what_is_not_a_middleware_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="middleware must be objects of classes derived from Middleware"):
        Queue("q", middleware=[wrong])
    with pytest.raises(ConfigError, match="or functions that take a job"):
        Worker("q", print, middleware=[wrong])


async def test_a_queue_without_middleware_has_a_plain_producer() -> None:
    class EndsOnly(Middleware):
        def on_end(self, end: JobEnd) -> None: ...

    plain = type(Queue("q").producer)
    assert type(Queue("q", middleware=[EndsOnly()]).producer) is plain
    assert type(Queue("q", middleware=[Tenant()]).producer) is not plain
