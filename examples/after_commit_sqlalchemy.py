"""Adding jobs when a SQLAlchemy session commits, and none when it rolls back. Needs sqlalchemy.

python examples/after_commit_sqlalchemy.py
"""

import asyncio
import os
import tempfile

from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tampu import Queue
from tampu.contrib.sqlalchemy import after_commit
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


def sign_up(session: Session, email: str) -> None:
    """Insert a user; the welcome is added when the transaction commits. With an AsyncSession it is the same call."""
    session.add(User(email=email))
    after_commit(session, welcome).add(email)


async def work() -> None:
    """Run what is in the queue. In production: tampu worker examples.after_commit_sqlalchemy:queue"""
    await run_until_empty(queue)
    await queue.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = create_engine(f"sqlite:///{folder}/app.db")
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            sign_up(session, "ada@example.com")
        try:
            with Session(engine) as session, session.begin():
                sign_up(session, "grace@example.com")
                sign_up(session, "ada@example.com")  # there already
        except IntegrityError:
            print("rolled back: no job was added")
        engine.dispose()
    asyncio.run(work())


if __name__ == "__main__":
    main()
