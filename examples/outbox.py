"""An outbox table: jobs that survive a process that dies between the commit and the add. Needs sqlalchemy.

python examples/outbox.py

The row for the job is written in the same transaction as the data. A relay moves committed rows into the queue; it may
die at any point and run in any number of processes.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from sqlalchemy import JSON, Engine, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tampu import Queue
from tampu.testing import run_until_empty

queue = Queue("emails", url=os.environ.get("TAMPU_URL", "embedded://"))


@queue.task
async def welcome(to: str) -> None:
    print("sending a welcome to", to)


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    email: Mapped[str] = mapped_column(primary_key=True)


class OutboxRow(Base):
    """A job to add. The id becomes the job's id, so it must never be used again: SQLite reuses numbers."""

    __tablename__ = "outbox"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    task: Mapped[str]
    arguments: Mapped[dict[str, Any]] = mapped_column(JSON)


def sign_up(engine: Engine, email: str) -> None:
    """Commit the user and the job's row together: both are there, or neither."""
    with Session(engine) as session, session.begin():
        session.add(User(email=email))
        session.add(OutboxRow(task=welcome.name, arguments={"to": email}))


def relay(engine: Engine, before_commit: Callable[[], None] = lambda: None) -> int:
    """Move up to 100 rows into the queue, and return how many. Call it in a loop, about once a second.

    If it dies after an add and before the commit, the row is relayed again under the same job ID, and the queue
    ignores it: within `dedup_ttl_secs` (an hour) an ID is added once.
    """
    with Session(engine) as session, session.begin():
        # skip_locked: several relays do not wait for each other. SQLite has no row locks and ignores it.
        rows = session.scalars(select(OutboxRow).limit(100).with_for_update(skip_locked=True)).all()
        for row in rows:
            queue.tasks[row.task].sync.add_unique(f"outbox-{row.id}", **row.arguments)
            session.delete(row)
        session.flush()
        before_commit()
    return len(rows)


def fail() -> None:
    raise RuntimeError("killed")


def show(engine: Engine, happened: str) -> None:
    with Session(engine) as session:
        rows = session.scalar(select(func.count()).select_from(OutboxRow))
        states = [queue.sync.get_job(f"outbox-{row_id}").state for row_id in session.scalars(select(OutboxRow.id))]
    print(f"{happened}: rows in the outbox: {rows}, their jobs: {states}")


async def work() -> None:
    """Run what is in the queue. In production: tampu worker examples.outbox:queue"""
    print("jobs run:", await run_until_empty(queue))
    await queue.close()


def main(path: str) -> None:
    engine = create_engine(f"sqlite:///{path}")
    Base.metadata.create_all(engine)

    died = subprocess.run([sys.executable, __file__, path])
    show(engine, f"a process died after its commit (exit code {died.returncode})")
    try:
        relay(engine, before_commit=fail)
    except RuntimeError:
        show(engine, "a relay died after its add")
    print("relayed:", relay(engine))
    show(engine, "done")
    engine.dispose()

    asyncio.run(work())


if __name__ == "__main__":
    if sys.argv[1:]:  # the process that dies
        sign_up(create_engine(f"sqlite:///{sys.argv[1]}"), "ada@example.com")
        os._exit(1)
    with tempfile.TemporaryDirectory() as folder:
        main(f"{folder}/app.db")
