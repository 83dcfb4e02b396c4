"""Adding jobs when a Django transaction commits, and none when it rolls back. Needs django.

python examples/after_commit_django.py

One file, so it configures Django itself; `tampu new shop --django` writes a whole project.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import django
from django.conf import settings
from django.db import IntegrityError, connection, models, transaction

from tampu import Queue
from tampu.contrib.django import after_commit
from tampu.testing import run_until_empty

folder = tempfile.TemporaryDirectory()
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(folder.name) / "app.db"}
settings.configure(DATABASES={"default": database})
django.setup()

queue = Queue("emails", url=os.environ.get("TAMPU_URL", "embedded://"))


@queue.task
async def welcome(to: str) -> None:
    print("sending a welcome to", to)


class User(models.Model):
    email = models.EmailField(unique=True)

    class Meta:
        app_label = "example"


def sign_up(email: str) -> None:
    """Insert a user; the welcome is added when the transaction commits."""
    User.objects.create(email=email)
    after_commit(welcome).add(email)


async def work() -> None:
    """Run what is in the queue. In production: tampu worker examples.after_commit_django:queue"""
    await run_until_empty(queue)
    await queue.close()


def main() -> None:
    with connection.schema_editor() as editor:
        editor.create_model(User)
    with transaction.atomic():
        sign_up("ada@example.com")
    try:
        with transaction.atomic():
            sign_up("grace@example.com")
            sign_up("ada@example.com")  # there already
    except IntegrityError:
        print("rolled back: no job was added")
    connection.close()
    asyncio.run(work())


if __name__ == "__main__":
    with folder:
        main()
