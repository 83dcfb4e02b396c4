"""A database session for each run: committed if the task succeeds, rolled back if it fails. Needs only Python.

python examples/database_session.py
"""

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tampu import Depends, JobFailed, Queue, Worker

queue = Queue("users", url=os.environ.get("TAMPU_URL", "embedded://"))
DATABASE = Path(tempfile.mkdtemp()) / "users.db"


def session() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(DATABASE)  # of a `def` task: opened, used and closed in the task's thread
    try:
        with connection:  # commits, or rolls back after an exception
            yield connection
    finally:
        connection.close()


@queue.task(attempts=1)
def register(name: str, *, db: sqlite3.Connection = Depends(session)) -> int:
    db.execute("INSERT INTO users (name) VALUES (?)", [name])
    if name == "mallory":
        raise ValueError("not this one")
    (count,) = db.execute("SELECT count(*) FROM users").fetchone()
    return int(count)


async def main() -> None:
    with sqlite3.connect(DATABASE) as connection:
        connection.execute("CREATE TABLE users (name TEXT)")
    async with queue, Worker(queue):
        print("users:", await (await register.add("ada")).result())
        try:
            await (await register.add("mallory")).result()
        except JobFailed as failed:
            print("rolled back:", failed.detail)
        print("users:", await (await register.add("grace")).result())


if __name__ == "__main__":
    asyncio.run(main())
