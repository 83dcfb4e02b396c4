"""Add jobs when a Django transaction commits: none if it rolls back.

    with transaction.atomic():
        user = User.objects.create(email=email)
        after_commit(welcome).add(user.pk)

If the process dies between the commit and the add, the job is lost; see "Add jobs after a commit" for an outbox table.
`tampu.contrib.django.tasks` has a backend for `django.tasks`.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from django.db import close_old_connections, transaction

from tampu.contrib.deferred import DeferringTask, send_blocking

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.contrib.deferred import DeferredAdd
    from tampu.task import ConfiguredTask, Task

P = ParamSpec("P")
R = TypeVar("R")


def after_commit(
    task: Task[P, Any] | ConfiguredTask[P, Any], *, using: str | None = None, robust: bool = False
) -> AfterCommit[P]:
    """Return `task` with adds that take effect when the current transaction commits, or at once outside of one.

    `using` and `robust` are those of `transaction.on_commit`: the database, and whether errors are logged instead of
    raised. The adds are checked and encoded at once, so a wrong argument fails before the commit. Each call is sent
    separately; use `add_bulk` for many jobs.
    """
    return AfterCommit(task, using, robust=robust)


class AfterCommit(DeferringTask[P]):
    """A task whose adds wait for the commit of a Django transaction."""

    def __init__(self, task: Task[P, Any] | ConfiguredTask[P, Any], using: str | None, *, robust: bool) -> None:
        super().__init__(task)
        self._using = using
        self._robust = robust

    def _defer(self, adds: list[DeferredAdd]) -> None:
        def add_jobs() -> None:  # not a partial: Django logs the name of a robust callback that fails
            send_blocking(adds)

        transaction.on_commit(add_jobs, using=self._using, robust=self._robust)


def fresh_connections(function: Callable[P, R]) -> Callable[P, R]:
    """Close broken and outdated database connections before and after each call, as Django does for a request.

    Workers do this for the `def` tasks of a program that has called `django.setup()`. It is for other functions that
    use the ORM in threads.

        @queue.task
        @fresh_connections
        def send_welcome(user_id: int) -> None: ...
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return call
