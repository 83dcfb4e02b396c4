"""Tasks of Django's framework, as an application has them. Imported after Django is configured."""

from __future__ import annotations

from typing import Any

import django
from django.db import connection

from tampu import UnrecoverableError

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task  # type: ignore[no-redef]


@task
def add(first: int, second: int = 0) -> int:
    return first + second


@task
async def shout(text: str) -> str:
    return text.upper()


@task(queue_name="reports")
def count_users() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM users")
        return int(cursor.fetchone()[0])


@task(takes_context=True)
def attempt(context: Any, until: int) -> dict[str, Any]:
    if context.attempt < until:
        raise ConnectionError("not yet")
    return {"attempt": context.attempt, "id": context.task_result.id}


@task
def broken(how: str) -> None:
    if how == "unrecoverable":
        raise UnrecoverableError("never")
    raise LookupError(how)


def no_task() -> None:
    raise AssertionError("a job must not be able to call this")
