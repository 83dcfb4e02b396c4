"""Tasks in processes whose queue has middleware, and which have dependencies."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator  # noqa: TC003 - resolved at runtime
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tampu import Depends, Middleware, Queue, UnrecoverableError

if TYPE_CHECKING:
    from tampu.middleware import NextRun
    from tampu.wire.job import Job

#: Only the process that imports the module first has set it.
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
PARENT = os.environ.setdefault("TAMPU_TEST_PARENT", str(os.getpid()))


class Tenant(Middleware):
    async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
        tenant.set(job.headers["tenant"])
        try:
            return await call_next(job)
        except ValueError as error:
            raise UnrecoverableError(f"replaced: {error}") from error


queue = Queue("processes-around", middleware=[Tenant()], headers={"tenant": "acme"})


def session() -> Iterator[list[str]]:
    log = ["open"]
    try:
        yield log
    except ValueError as error:
        raise ValueError(f"closed after {type(error).__name__}") from None


async def session_later(inner: list[str] = Depends(session)) -> AsyncIterator[list[str]]:
    yield inner


@queue.task(process=True)
def whose(*, db: list[str] = Depends(session)) -> list[Any]:
    return [tenant.get(), str(os.getpid()) != PARENT, *db]


@queue.task(process=True)
async def whose_async(*, db: list[str] = Depends(session_later)) -> list[Any]:
    return [tenant.get(), str(os.getpid()) != PARENT, *db]


@queue.task(process=True)
def fails(*, db: list[str] = Depends(session)) -> None:
    raise ValueError("no")
