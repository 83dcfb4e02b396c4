"""Recovery for senders that keep unanswered requests: the producer's chain and the worker's settler.

On an error both stop sending, let a `Recovery` apply the error's remedy and wait for a connection, and then resend in
order. A producer gives up after its patience; a worker never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING

from tampu.errors import Error, RedisError
from tampu.redis.client import backoff_secs
from tampu.redis.faults import PASSING, ConnectionLost, Remedy, ServerError, remedy_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.redis.client import Client
    from tampu.redis.connection import Connection

logger = logging.getLogger("tampu.redis")

#: Longest pause before resending what the server did not accept yet (a full queue, a gap in the chain), in seconds.
POLL_SECS = 0.05
#: How long a worker waits for a connection before it logs the reason and waits again, in seconds.
CONNECT_PATIENCE_SECS = 3600.0


class Recovery:
    """Runs at most one recovery at a time for one sender.

    Calls `resume(connection)` when sending may continue, and `give_up(error)` when it cannot. After an ASK the
    connection is that of the node to ask, for the requests to resend only. With `patience_secs` a recovery fails when
    the errors have lasted that long; without, only when connecting fails permanently.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        resume: Callable[[Connection], None],
        give_up: Callable[[Error], None],
        patience_secs: float | None = None,
    ) -> None:
        self._client = client
        self._name = name
        self._resume = resume
        self._give_up = give_up
        self._patience = math.inf if patience_secs is None else patience_secs
        #: The recovery in progress, if any; nothing may be sent meanwhile.
        self.task: asyncio.Task[None] | None = None
        self._error: RedisError | None = None
        self._seen_on: Connection | None = None
        #: Recoveries since the server last accepted anything.
        self.attempt = 0
        #: When the errors began, by the event loop's clock; None if there are none.
        self.since: float | None = None

    def note(self, error: RedisError, seen_on: Connection | None) -> None:
        """Remember an error and its connection. Only the first error since the last recovery is kept."""
        if self._error is None:
            self._error, self._seen_on = error, seen_on
            if self.since is None and isinstance(error, ConnectionLost) and seen_on is not None:
                # The time spent waiting for the missing reply counts towards the patience as well.
                self.since = asyncio.get_running_loop().time() - seen_on.silent_secs

    def accepted(self) -> None:
        """Note that the server accepted a request: the recovery succeeded."""
        self.attempt = 0
        self.since = None

    def start(self) -> None:
        """Start a recovery, unless one is in progress."""
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._run(), name=f"tampu-{self._name}-recovery")

    def stop(self) -> None:
        """Cancel the recovery in progress, if any."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def abandon(self) -> None:
        """Forget the recovery of the parent of a fork, or of an event loop that has ended."""
        self.task = None
        self._error = None
        self.accepted()

    async def _run(self) -> None:
        this = self.task
        error, self._error = self._error, None
        try:
            connection = await self._recover(error)
            if self.task is this:  # not abandoned in the meantime
                self.task = None
                self._resume(connection)
        except Error as raised:
            self._fail(this, error if isinstance(error, ServerError) else raised)
        except Exception as raised:
            logger.exception("internal error in the %s (please report it)", self._name)
            self._fail(this, RedisError(f"resending failed: {raised!r}"))

    def _fail(self, task: asyncio.Task[None] | None, error: Error) -> None:
        if self.task is task or self.task is None:
            self.task = None
            self._give_up(error)

    async def _recover(self, error: RedisError | None) -> Connection:
        loop = asyncio.get_running_loop()
        if self.since is None:
            self.since = loop.time()
        deadline = self.since + self._patience
        attempt, self.attempt = self.attempt, self.attempt + 1
        if isinstance(error, ServerError) and error.kind == "ASK":
            with contextlib.suppress(RedisError):  # then wait for the slot's migration to end
                return await self._client.asking(error)
        if error is None:
            if attempt:
                await asyncio.sleep(min(POLL_SECS, backoff_secs(attempt)))
        elif math.isinf(deadline) and (remedy_of(error) in _NO_REMEDY or getattr(error, "kind", "") in PASSING):
            await asyncio.sleep(backoff_secs(attempt + 2))
        elif not await self._client.apply_remedy(error, attempt, deadline, self._seen_on):
            if isinstance(error, ConnectionLost):
                raise ConnectionLost(f"gave up after {round(loop.time() - self.since, 1):g} s: {error}") from error
            raise error
        return await self._client.up(min(max(deadline - loop.time(), 0.001), CONNECT_PATIENCE_SECS), self.since)


_NO_REMEDY = (Remedy.NONE, Remedy.MAKE_GROUP)
