"""Gives a task access to the job it runs, for its ID or for reporting progress."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tampu.wire.job import Job

_current: ContextVar[Job[Any] | None] = ContextVar("tampu_current_job", default=None)


def current_job() -> Job[Any]:
    """Return the job that the calling task runs. Raises `RuntimeError` outside of a task.

    A thread that the task starts does not see it: pass the job as an argument.
    """
    job = _current.get()
    if job is None:
        raise RuntimeError("no job is running here: call current_job() inside a task that a worker runs")
    return job


@contextlib.contextmanager
def context_of(job: Job[Any]) -> Iterator[None]:
    """Make `job` the current job inside a `with` block."""
    token = _current.set(job)
    try:
        yield
    finally:
        _current.reset(token)


def set_current_job(job: Job[Any]) -> None:
    """Set the current job of this context. Called before each run."""
    _current.set(job)
