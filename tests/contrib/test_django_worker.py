"""Workers of a Django project: `manage.py tampu worker`, and database connections that do not outlive a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from api.workers import working
from tampu import Queue

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server

FILES = {
    "manage.py": """
import os
import sys

from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop_settings")
execute_from_command_line(sys.argv)
""",
    "shop_settings.py": """
SECRET_KEY = "secret"
INSTALLED_APPS = ["django.contrib.contenttypes", "tampu.contrib.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
""",
    "shop_tasks.py": """
from django.contrib.contenttypes.models import ContentType  # needs django.setup()
from tampu import Queue

queue = Queue("shop")


@queue.task
def model_name() -> str:
    return ContentType.__name__


@queue.task(process=True)
def model_name_in_process() -> str:
    return ContentType.__name__
""",
}


def test_manage_py_runs_a_worker_of_the_project(server: Server, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name, text in FILES.items():
        (project / name).write_text(text)
    command = [sys.executable, str(project / "manage.py"), "tampu", "worker", "shop_tasks:queue"]
    environment = os.environ | {"TAMPU_URL": server.url}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as worker:  # not in the folder of the project
        try:
            with Queue("shop", url=server.url).sync as queue:
                jobs = [queue.add(name, {}) for name in ("model_name", "model_name_in_process")]
                assert [job.result(60) for job in jobs] == ["ContentType"] * 2
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0


@pytest.mark.usefixtures("django_databases")
async def test_database_connections_of_def_tasks_are_closed(server: Server) -> None:
    from django.db import connection

    used: list[object] = []

    async with Queue("q", url=server.url) as queue:

        @queue.task
        def work() -> None:
            assert connection.connection is None  # CONN_MAX_AGE is 0: that of the run before is closed
            connection.ensure_connection()
            used.append(connection.connection)

        async with working(queue, concurrency=1):  # one thread
            for _ in range(3):
                await (await work.add()).result(10)
    assert len(used) == 3
