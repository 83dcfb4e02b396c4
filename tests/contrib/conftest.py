"""A queue to add to, and Django configured once for the run: two real SQLite databases and a `TASKS` backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tampu import Queue
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from servers.process import Server
    from tampu import Job, Task


class Mail:
    """A queue with one task, and what is in the queue."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.queue = Queue("mail", url=url, **settings)

        @self.queue.task
        async def welcome(to: str) -> None: ...

        self.welcome: Task[[str], None] = welcome

    def waiting(self) -> list[str]:
        """The addresses in the queue, in their order."""
        return [job.payload["to"] for job in self._jobs()]

    def headers(self) -> list[dict[str, str]]:
        """The headers of the jobs in the queue."""
        return [job.headers for job in self._jobs()]

    def _jobs(self) -> list[Job[Any]]:
        async def read() -> list[Job[Any]]:
            client = self.queue.sync._inner.producer.ready_client()
            entries = await client.call("XRANGE", self.queue.keys.stream, "-", "+")
            return [decode_job(read_job_fields(fields)[0] or b"") for _, fields in entries]

        return self.queue.sync._run(read())


@pytest.fixture
async def mail(server: Server) -> AsyncIterator[Mail]:
    mail = Mail(server.url)
    yield mail
    await mail.queue.close()


@pytest.fixture(scope="session")
def _django(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Django's settings can be made once in a process."""
    import django
    from django.conf import settings

    folder = tmp_path_factory.mktemp("django")
    database = {"ENGINE": "django.db.backends.sqlite3"}
    settings.configure(
        DATABASES={name: {**database, "NAME": folder / f"{name}.db"} for name in ("default", "other")},
        USE_TZ=True,
        INSTALLED_APPS=[] if django.VERSION >= (6, 0) else ["django_tasks"],
        TASKS={
            "default": {
                "BACKEND": "tampu.contrib.django.tasks.TampuBackend",
                "QUEUES": ["default", "reports"],
                "OPTIONS": {"attempts": 2, "backoff": 1},
            },
            "elsewhere": {"BACKEND": f"{tasks_package()}.backends.dummy.DummyBackend"},
        },
    )
    django.setup()


@pytest.fixture
def django_databases(_django: None) -> Iterator[None]:
    """Two databases with an empty table `users`."""
    from django.db import connections

    for connection in connections.all():
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS users (email TEXT UNIQUE)")
            cursor.execute("DELETE FROM users")
    yield
    connections.close_all()


def tasks_package() -> str:
    """Where this Django's task framework is."""
    import django

    return "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
