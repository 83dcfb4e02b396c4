"""The job a task runs for. Tasks get arguments, not the job; this is for those that want its id or tell progress."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tampu.wire.job import Job

_current: ContextVar[Job[Any] | None] = ContextVar("tampu_current_job", default=None)


def current_job() -> Job[Any]:
    """The job that is being run: inside a task, and in what it calls. `RuntimeError` elsewhere.

    A thread that a task starts by itself knows no job: pass it on as an argument.
    """
    job = _current.get()
    if job is None:
        raise RuntimeError("current_job() is for code that runs as a job: inside a task, called by a worker")
    return job


def set_current_job(job: Job[Any]) -> None:
    """Called before each run, in the context in which the task then runs."""
    _current.set(job)
