"""Jobs added when a SQLAlchemy session commits, on a real SQLite database; sync and async sessions."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String, create_engine, event, func, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from contrib.conftest import Mail
from tampu import ConfigError, EncodeError, Queue, QueueFullError
from tampu.contrib.sqlalchemy import INFO_KEY, after_commit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from servers.process import Server


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(200), unique=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/app.db", poolclass=NullPool)
    use_real_savepoints(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
async def async_engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db", poolclass=NullPool)
    use_real_savepoints(engine.sync_engine)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield engine
    await engine.dispose()


def use_real_savepoints(engine: Engine) -> None:
    """Have SQLAlchemy emit BEGIN itself: Python's sqlite3 driver would begin too late for savepoints."""

    @event.listens_for(engine, "connect")
    def no_begin_of_the_driver(connection: Any, record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


def test_a_job_is_added_when_the_session_commits_and_not_before(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session:
        session.add(User(email="ada"))
        after_commit(session, mail.welcome).add("ada")
        session.flush()
        assert mail.waiting() == []
        session.commit()
        assert mail.waiting() == ["ada"]
        session.add(User(email="grace"))
        session.commit()  # nothing of the first transaction is left
    assert mail.waiting() == ["ada"]


@pytest.mark.parametrize("how", ["rollback", "error", "close"])
def test_nothing_is_added_when_the_transaction_does_not_commit(engine: Engine, mail: Mail, how: str) -> None:
    with Session(engine) as session:
        after_commit(session, mail.welcome).add("lost")
        if how == "rollback":
            session.rollback()
        elif how == "close":
            session.close()
        else:
            session.add_all([User(email="same"), User(email="same")])
            with pytest.raises(Exception, match="UNIQUE constraint"):
                session.commit()
            session.rollback()
        after_commit(session, mail.welcome).add("kept")
        session.commit()
        assert session.info[INFO_KEY]._adds == {}
    assert mail.waiting() == ["kept"]


def test_a_released_savepoint_adds_nothing_until_the_commit(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session:
        session.add(User(email="ada"))
        with session.begin_nested():
            after_commit(session, mail.welcome).add("inner")
        assert mail.waiting() == []
        session.rollback()
        assert mail.waiting() == []
        with session.begin_nested(), session.begin_nested():
            after_commit(session, mail.welcome).add("innermost")
        session.commit()
    assert mail.waiting() == ["innermost"]


def test_a_savepoint_that_rolls_back_takes_its_jobs_along(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session, session.begin():
        after_commit(session, mail.welcome).add("before")
        outer = session.begin_nested()
        after_commit(session, mail.welcome).add("in the outer savepoint")
        with session.begin_nested():
            after_commit(session, mail.welcome).add("released into the outer savepoint")
        outer.rollback()
        after_commit(session, mail.welcome).add("after")
    assert mail.waiting() == ["before", "after"]


def test_a_savepoint_that_is_still_open_at_the_commit_counts(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session:
        session.begin_nested()
        after_commit(session, mail.welcome).add("ada")
        session.commit()
    assert mail.waiting() == ["ada"]


def test_a_hook_of_a_flush_may_request_jobs(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session:

        @event.listens_for(session, "before_flush")
        def welcome_new_users(flushing: Session, *_: object) -> None:
            for user in flushing.new:
                assert isinstance(user, User)
                after_commit(flushing, mail.welcome).add(user.email)

        session.add(User(email="ada"))
        session.commit()
    assert mail.waiting() == ["ada"]


def test_jobs_of_one_transaction_are_sent_in_one_call_and_in_order(engine: Engine, mail: Mail, server: Server) -> None:
    names = [f"user {number}" for number in range(50)]
    mail.welcome.sync.add("first")  # connects and loads the scripts

    def script_calls() -> int:
        stats = server.client().info("commandstats")
        return sum(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in ("evalsha", "eval", "fcall"))

    before = script_calls()
    with Session(engine) as session, session.begin():
        for name in names[:25]:
            after_commit(session, mail.welcome).add(name)
        after_commit(session, mail.welcome).add_bulk(names[25:])
    # The first job of a turn of the event loop leaves at once, the others follow as one window.
    assert script_calls() - before == 2
    assert mail.waiting() == ["first", *names]


def test_every_form_of_add_waits_for_the_commit(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session, session.begin():
        deferred = after_commit(session, mail.welcome)
        deferred.add_in(3600, "in an hour")
        deferred.add_at(time.time() + 7200, "in two hours")
        deferred.add_unique("ada-1", "once")
        deferred.add_unique("ada-1", "twice")
        deferred.add_bulk([])
    assert mail.waiting() == ["once"]
    assert mail.queue.sync.get_job("ada-1").state == "waiting"
    assert mail.queue.sync.purge() == 3


def test_the_options_of_a_job_wait_for_the_commit_with_it(engine: Engine, mail: Mail) -> None:
    tenant = mail.welcome.using(headers={"tenant": "acme"})
    with Session(engine) as session, session.begin():
        deferred = after_commit(session, tenant.using(unique="ada-1", delay=3600))
        deferred.add("ada")
        after_commit(session, tenant).add_unique("ada-2", "now")
        with pytest.raises(ConfigError, match="unique is the ID of a single job"):
            deferred.add_bulk(["ada"])
        assert mail.queue.sync.get_job("ada-1").state == "unknown"
    assert [mail.queue.sync.get_job(one).state for one in ("ada-1", "ada-2")] == ["delayed", "waiting"]
    assert mail.headers() == [{"tenant": "acme"}]


def test_wrong_adds_fail_before_the_commit(engine: Engine, mail: Mail) -> None:
    with Session(engine) as session, session.begin():
        deferred: Any = after_commit(session, mail.welcome)
        with pytest.raises(TypeError, match="missing a required argument: 'to'"):
            deferred.add()
        with pytest.raises(EncodeError):
            deferred.add(object())
        with pytest.raises(ConfigError, match="delay"):
            deferred.add_in(-1, "ada")
        with pytest.raises(ConfigError, match="run_at"):
            deferred.add_at("tomorrow", "ada")
        with pytest.raises(ConfigError, match="job_id"):
            deferred.add_unique("", "ada")
        with pytest.raises(ConfigError, match="max_payload_bytes"):
            deferred.add("x" * 2_000_000)
        with pytest.raises(ConfigError, match="max_payload_bytes"):
            deferred.add_bulk(["fine", "x" * 2_000_000])
    assert mail.waiting() == []


def test_the_error_of_a_failed_add_says_that_the_data_are_committed(engine: Engine, server: Server) -> None:
    mail = Mail(server.url, max_stream_len=1)
    mail.welcome.sync.add("first")
    with Session(engine) as session:
        session.add(User(email="ada"))
        after_commit(session, mail.welcome).add("refused")
        with pytest.raises(QueueFullError) as raised:
            session.commit()
        assert raised.value.__notes__ == [
            "The transaction is committed, but 1 of its 1 jobs were not confirmed: welcome (queue mail)"
        ]
        # The session can still be used, and does not send the job again.
        assert session.scalar(select(func.count()).select_from(User)) == 1
        mail.queue.sync.purge()
        session.commit()
    assert mail.waiting() == []
    mail.queue.sync.close()


def test_one_full_queue_does_not_keep_jobs_from_another(engine: Engine, mail: Mail, server: Server) -> None:
    full = Queue("full", url=server.url, max_stream_len=1)
    full.sync.add("other", {})

    @full.task
    async def archive(name: str) -> None: ...

    with Session(engine) as session:
        after_commit(session, archive).add("refused")
        after_commit(session, mail.welcome).add("ada")
        with pytest.raises(QueueFullError):
            session.commit()
    assert mail.waiting() == ["ada"]
    full.sync.close()


def test_a_session_without_autobegin_needs_a_transaction(engine: Engine, mail: Mail) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(ConfigError, match="autobegin is off"):
            after_commit(session, mail.welcome).add("ada")
        with session.begin():
            after_commit(session, mail.welcome).add("ada")
    assert mail.waiting() == ["ada"]


def test_a_scoped_session_means_the_session_of_its_scope(engine: Engine, mail: Mail) -> None:
    scoped = scoped_session(sessionmaker(engine))
    after_commit(scoped, mail.welcome).add("ada")
    scoped.commit()
    scoped.remove()
    assert mail.waiting() == ["ada"]


async def test_an_async_session_adds_on_its_own_event_loop(async_engine: AsyncEngine, mail: Mail) -> None:
    async with AsyncSession(async_engine) as session:
        session.add(User(email="ada"))
        after_commit(session, mail.welcome).add("ada")
        async with session.begin_nested() as savepoint:
            after_commit(session, mail.welcome).add("dropped")
            await savepoint.rollback()
        await session.commit()
        after_commit(session, mail.welcome).add("rolled back")
        await session.rollback()
        await session.run_sync(lambda inner: after_commit(inner, mail.welcome).add("grace"))
        await session.commit()
    assert mail.queue._sync is None  # the thread of the synchronous API was not started
    assert mail.waiting() == ["ada", "grace"]


def test_sqlalchemy_is_imported_by_its_module_only_and_needs_no_greenlet() -> None:
    blocked = "import sys; sys.modules['greenlet'] = None\n"
    checks = "import tampu.queue, tampu.worker, tampu.testing, tampu.contrib\nassert 'sqlalchemy' not in sys.modules\n"
    use = "from tampu.contrib.sqlalchemy import after_commit\nassert 'sqlalchemy.ext.asyncio' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", blocked + checks + use], check=True)
