"""Add jobs when a SQLAlchemy session commits: none if it rolls back.

    with Session(engine) as session, session.begin():
        session.add(user)
        after_commit(session, welcome).add(user.email)

Works for `Session` and `AsyncSession`, and with savepoints: jobs added inside one that rolls back are dropped. If the
process dies between the commit and the add, the jobs are lost; see "Add jobs after a commit" for an outbox table.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ParamSpec

from sqlalchemy import event
from sqlalchemy.util import await_only

from tampu.contrib.deferred import DeferringTask, send, send_blocking
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session

    from tampu.contrib.deferred import DeferredAdd
    from tampu.task import ConfiguredTask, Task

    AnySession = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]

P = ParamSpec("P")

#: The key in `session.info` of a session's pending adds.
INFO_KEY = "tampu.after_commit"


def after_commit(session: AnySession, task: Task[P, Any] | ConfiguredTask[P, Any]) -> AfterCommit[P]:
    """Return `task` with adds that take effect when `session` commits its current transaction.

    The adds are checked and encoded at once, so a wrong argument fails before the commit. They are sent together, after
    the connection is back in its pool. If sending fails, `commit()` raises although the data is committed.
    """
    # A scoped session stands for the session of the current thread or task.
    registry = getattr(session, "registry", None)
    found: Any = session if registry is None else registry()
    return AfterCommit(getattr(found, "sync_session", found), task)


class AfterCommit(DeferringTask[P]):
    """A task whose adds wait for the commit of a session."""

    def __init__(self, session: Session, task: Task[P, Any] | ConfiguredTask[P, Any]) -> None:
        super().__init__(task)
        self._session = session

    def _defer(self, adds: list[DeferredAdd]) -> None:
        pending = self._session.info.get(INFO_KEY)
        if pending is None:
            pending = self._session.info[INFO_KEY] = _Pending(self._session)
        pending.put(adds)


class _Pending:
    """The adds of one session, by the transaction or savepoint they were requested in."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._adds: dict[SessionTransaction, list[DeferredAdd]] = {}
        self._committed: SessionTransaction | None = None
        event.listen(session, "after_commit", self._on_commit)
        event.listen(session, "after_transaction_end", self._on_end)

    def put(self, adds: list[DeferredAdd]) -> None:
        session = self._session
        if not session.in_transaction():
            if not session.autobegin:
                raise ConfigError("after_commit() outside a transaction, and autobegin is off: call session.begin()")
            session.begin()  # as session.add() does
        self._adds.setdefault(_innermost(session), []).extend(adds)

    def _on_commit(self, session: Session) -> None:
        # Also called when a savepoint is released, which commits nothing.
        self._committed = _innermost(session)

    def _on_end(self, session: Session, transaction: SessionTransaction) -> None:
        # Called for every transaction and savepoint, however it ended. At the commit, `after_commit` came just before.
        # The adds are sent here rather than there because the session is consistent now: if sending raises, it can
        # still be used.
        adds = self._adds.pop(transaction, None)
        is_committed = transaction is self._committed
        self._committed = None
        if adds is None or not is_committed:
            return
        if transaction.nested:
            self._adds.setdefault(_around(transaction), []).extend(adds)
        elif _is_asynchronous(session):
            await_only(send(adds))
        else:
            send_blocking(adds)


def _innermost(session: Session) -> SessionTransaction:
    found = session.get_nested_transaction() or session.get_transaction()
    assert found is not None  # noqa: S101 - callers made sure of it
    return found


def _around(savepoint: SessionTransaction) -> SessionTransaction:
    """Return the transaction or savepoint around a savepoint, past the subtransactions of a flush."""
    outer = savepoint.parent
    while outer is not None and outer.parent is not None and not outer.nested:
        outer = outer.parent
    assert outer is not None  # noqa: S101 - a savepoint is inside a transaction
    return outer


def _is_asynchronous(session: Session) -> bool:
    # Not imported here: it needs greenlet, which programs without an AsyncSession may not have installed.
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return module is not None and module.async_session(session) is not None
