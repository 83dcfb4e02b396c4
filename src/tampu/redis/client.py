"""The `Client`: a connection to the server of one queue that reconnects whenever it breaks.

Many callers share one Client; requests of one event loop iteration are sent together. The Client finds the right server
(sentinel, Cluster slot), logs in with fresh credentials, loads the scripts, and notifies its users of new connections.
The Clients of several queues on a Cluster may share their connections (`nodes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import weakref
from dataclasses import replace

# asyncio resolves host names in threads, which import `queue`. Importing it here reports a user's queue.py that shadows
# the standard library right away, not at the first connection. The traceback shows the line with its comment.
from queue import SimpleQueue  # noqa: F401 - an error here: your own queue.py hides the standard library's; rename it
from typing import TYPE_CHECKING

from tampu.embedded.server import EmbeddedLease
from tampu.errors import Error, RedisError, ShutdownError
from tampu.redis.connection import AskingConnection, Connection, Part, Reply, future_setter, pack_command
from tampu.redis.discovery import locate, log_in, open_connection
from tampu.redis.faults import ConnectionLost, Remedy, ServerError, Unreachable, refused_login, remedy_of
from tampu.redis.nodes import AnyConnection, SharedConnections, WatchingConnection, WatchRefused
from tampu.redis.settings import Address, ConnectionSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tampu.redis.scripts import Script

#: Backoff between attempts to connect, in seconds: doubles from the first to the last, with up to 50% jitter.
FIRST_BACKOFF_SECS = 0.05
LAST_BACKOFF_SECS = 2.0
#: Default for how long a call waits for a connection, or for a temporary error to pass, in seconds.
DEFAULT_PATIENCE_SECS = 10.0


def backoff_secs(attempt: int) -> float:
    """Return the delay before attempt `attempt`, in seconds; 0 for attempt 0."""
    if attempt == 0:
        return 0.0
    full = min(FIRST_BACKOFF_SECS * 2.0 ** min(attempt - 1, 16), LAST_BACKOFF_SECS)
    return full * random.uniform(0.5, 1.0)


class Client:
    """Keeps one connection to the server that holds `routing_key`."""

    def __init__(
        self,
        settings: ConnectionSettings,
        routing_key: bytes,
        scripts: Sequence[Script] = (),
        *,
        response_timeout_secs: float | None = None,
        shared: SharedConnections | None = None,
        may_lack_scripts: bool = False,
    ) -> None:
        self._settings = settings
        #: Where it gets its connections from; None if it opens its own. All Clients there have the same scripts.
        self._shared = shared
        self._routing_key = routing_key
        self._scripts = scripts
        #: True: connect even if the user may not load scripts, because reading needs none. A call of one then raises.
        self._may_lack_scripts = may_lack_scripts
        self._response_timeout = response_timeout_secs or settings.response_timeout_secs
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._moved_to: Address | None = None
        #: The connection that follows ASK redirects, and its address.
        self._asking: tuple[Address, Connection] | None = None
        self._last_error: RedisError | None = None
        self._closed = False
        self._lease = EmbeddedLease(settings.data_dir) if settings.kind == "embedded" else None
        self._prepare: Callable[[Connection], Awaitable[None]] = _nothing
        self._up_callbacks: list[Callable[[Connection], None]] = []
        self._loss_callbacks: list[Callable[[], None]] = []
        #: Number of connections made so far, including the first.
        self.connections_made = 0
        _open_clients.add(self)

    @property
    def connection(self) -> Connection | None:
        """The live connection; None while disconnected."""
        connection = self._connection
        return connection if connection is not None and connection.is_up else None

    @property
    def sockets(self) -> set[Connection]:
        """The live connection, which may be shared, and the one on which the server reports changed keys, if any."""
        connection = self.connection
        reports = connection.reports if isinstance(connection, WatchingConnection) else None
        return {each for each in (connection, reports) if each is not None}

    @property
    def is_shared(self) -> bool:
        """Return True if its connection is shared with other Clients, so it must not be blocked."""
        return self._shared is not None

    def prepare_with(self, prepare: Callable[[Connection], Awaitable[None]]) -> None:
        """Await `prepare(connection)` for each new connection, before anything else is sent on it."""
        self._prepare = prepare

    def on_up(self, callback: Callable[[Connection], None]) -> None:
        """Call `callback` with each new connection, after login and preparation, before other requests."""
        self._up_callbacks.append(callback)

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a connection breaks, after its requests have failed."""
        self._loss_callbacks.append(callback)

    async def up(self, patience_secs: float = DEFAULT_PATIENCE_SECS, since: float | None = None) -> Connection:
        """Return the live connection; connect if necessary. Raises `Unreachable` after `patience_secs`.

        The error reports the time since `since`, by the event loop's clock (default: now).
        """
        connection = self.connection
        if connection is not None:
            return connection
        if self._closed:
            raise ShutdownError("the connection is closed")
        task = self.connect_in_background()
        loop = asyncio.get_running_loop()
        since = loop.time() if since is None else since
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that arrives together with the result.
            async with asyncio.timeout(patience_secs):
                return await asyncio.shield(task)
        except TimeoutError:
            where = ", ".join(map(str, self._settings.addresses)) or "the embedded server"
            waited = round(loop.time() - since, 1)
            raise Unreachable(
                f"no connection to {where} within {waited:g} s: {self._last_error or 'no reply'}"
            ) from self._last_error

    def connect_in_background(self) -> asyncio.Task[Connection]:
        """Start connecting, unless already in progress. The task ends with the connection or a permanent error."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="tampu-connect")
            # Retrieve the error, or asyncio logs it when no caller awaits the task.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._connecting

    async def call(self, *parts: Part, resend: bool = True, patience_secs: float = DEFAULT_PATIENCE_SECS) -> Reply:
        """Send one command and return its reply, waiting up to `patience_secs` for temporary errors to pass.

        `resend=False` raises `ConnectionLost` instead of sending again, for commands that must not run twice.
        """
        return await self.send(pack_command(parts), resend=resend, patience_secs=patience_secs)

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes | str],
        args: Sequence[Part],
        *,
        resend: bool = True,
        patience_secs: float = DEFAULT_PATIENCE_SECS,
    ) -> Reply:
        """Call a script and return its reply, with the options of `call`."""
        return await self.send(script.packed_call(keys, args), resend=resend, patience_secs=patience_secs)

    async def call_many(
        self, commands: Sequence[tuple[Part, ...]], *, patience_secs: float = DEFAULT_PATIENCE_SECS
    ) -> list[Reply]:
        """Send several commands together and return their replies in order. They may run twice."""
        return list(await asyncio.gather(*(self.call(*parts, patience_secs=patience_secs) for parts in commands)))

    async def call_each(self, commands: Sequence[tuple[Part, ...]]) -> list[Reply]:
        """Send several commands in one request and return their replies in order, errors as values. They may run twice.

        One error does not affect the other commands. Commands with a temporary error are sent again, one by one.
        """
        if not commands:
            return []
        requests = [pack_command(parts) for parts in commands]
        connection = self.connection or await self.up()
        replies: list[Reply] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def record(reply: Reply) -> None:
            replies.append(reply)
            if len(replies) == len(requests) and not done.done():
                done.set_result(None)

        for packed in requests:
            connection.request(packed, record)
        await done
        passing = [
            number
            for number, reply in enumerate(replies)
            if isinstance(reply, RedisError) and remedy_of(reply) not in (Remedy.NONE, Remedy.MAKE_GROUP)
        ]
        again = await asyncio.gather(*(self.send(requests[number]) for number in passing), return_exceptions=True)
        for number, reply in zip(passing, again, strict=True):
            if isinstance(reply, BaseException) and not isinstance(reply, Error):
                raise reply
            replies[number] = reply
        return replies

    async def server_time_ms(self) -> int:
        """Return the server's clock in epoch milliseconds."""
        seconds, microseconds = await self.call("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def send(self, packed: bytes, *, resend: bool = True, patience_secs: float = DEFAULT_PATIENCE_SECS) -> Reply:
        """Send one packed command and return its reply, with the options of `call`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + patience_secs
        attempt = 0
        while True:
            connection = self.connection or await self.up(max(deadline - loop.time(), 0.001), began)
            future: asyncio.Future[Reply] = loop.create_future()
            connection.request(packed, future_setter(future))
            seen_on: Connection | None = connection
            try:
                return await future
            except (ServerError, ConnectionLost) as failure:
                error: RedisError = failure
            if isinstance(error, ServerError) and error.kind == "ASK":
                try:
                    return await self._follow_ask(error, packed)
                except (ServerError, ConnectionLost, Unreachable) as failure:
                    error, seen_on = failure, None
            if isinstance(error, ConnectionLost) and not resend:
                raise error
            if not await self.apply_remedy(error, attempt, deadline, seen_on):
                raise error
            attempt += 1

    async def apply_remedy(self, error: RedisError, attempt: int, deadline: float, seen_on: Connection | None) -> bool:
        """Apply the remedy of an error. Return False if there is none, or the deadline is too close.

        `seen_on` is the connection on which the error occurred: a newer connection is not closed.
        """
        remedy = remedy_of(error)
        if remedy in (Remedy.NONE, Remedy.MAKE_GROUP):
            return False
        # An error that only needs time gets a pause even before the first retry; the others are retried at once.
        pause = backoff_secs(attempt + 1 if remedy is Remedy.WAIT else attempt)
        left = deadline - asyncio.get_running_loop().time()
        if remedy is Remedy.WAIT and left > 0:
            pause = min(pause, left)  # the last try is at the deadline
        elif pause > max(left, 0.0):
            return False
        if remedy is Remedy.REDISCOVER and (self._shared is None or seen_on is self._connection):
            self._record_move(error)
        if remedy is Remedy.REDISCOVER and self._shared is not None:
            self._detach(seen_on)
        elif remedy in (Remedy.REDISCOVER, Remedy.RECONNECT) and seen_on is not None:
            seen_on.close()
        if pause:
            await asyncio.sleep(pause)
        if remedy is Remedy.LOAD_SCRIPTS:
            with contextlib.suppress(ConnectionLost):  # the next connection loads them again
                await self.load_scripts()
        return True

    def _record_move(self, error: RedisError) -> None:
        """Remember the address in a MOVED error; for other errors the server is located again."""
        words = str(error).split()
        if isinstance(error, ServerError) and error.kind == "MOVED" and len(words) >= 3:
            self._moved_to = _moved_address(words[2], self._settings)

    def add_scripts(self, scripts: Sequence[Script]) -> None:
        """Load these scripts, too: on new connections, and when one is missing."""
        self._scripts = tuple(dict.fromkeys((*self._scripts, *scripts)))

    async def load_scripts(self) -> None:
        """Load this client's scripts again, after the server lost them."""
        connection = await self.up()
        for script in self._scripts:
            await connection.ask("SCRIPT", "LOAD", script.text)
        await self._prepare(connection)

    async def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        task, self._connecting = self._connecting, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._stop_asking()
        if self._connection is not None:
            if self._shared is not None:
                self._detach(self._connection)
            else:
                self._connection.close()
            await asyncio.sleep(0)  # the transport closes its socket in the next iteration
        if self._lease is not None:
            await self._lease.release()

    def abandon(self) -> None:
        """Drop the connection of the parent of a fork, or of an event loop that has ended; the next use reconnects."""
        connections = (self._connection, self._asking and self._asking[1])
        _left_alone.extend(each for each in connections if each is not None and not each.detach())
        self._connection = self._asking = None
        self._connecting = None

    # --- connecting

    async def _connect(self) -> Connection:
        attempt = 0
        while True:
            await asyncio.sleep(backoff_secs(attempt))
            try:
                address = self._moved_to or await locate(self._settings, self._routing_key, self._lease)
                self._moved_to = None
                connection = await self._open(address)
            except ServerError as error:
                # NOAUTH directly after logging in will not go away by retrying.
                if error.remedy is Remedy.NONE or error.kind == "NOAUTH":
                    raise
                self._last_error = error
            except (Unreachable, ConnectionLost) as error:
                self._last_error = error
            else:
                self._connection = connection
                self._stop_asking()
                self._last_error = None
                self.connections_made += 1
                for callback in self._up_callbacks:
                    callback(connection)
                return connection
            attempt += 1

    async def _open(self, address: Address) -> Connection:
        """Connect to this address and prepare the connection."""
        shared = self._shared
        try:
            if shared is None:
                connection = await self._log_in(address, Connection)
            else:
                connection = await shared.attach(address, self._log_in)
        except WatchRefused:
            self._shared = shared = None
            connection = await self._log_in(address, Connection)
        try:
            await self._prepare(connection)
        except BaseException:
            if shared is None:
                connection.close()
            else:
                shared.detach(connection)
            raise
        for callback in self._loss_callbacks:
            connection.on_loss(callback)
        return connection

    async def _log_in(self, address: Address, kind: type[AnyConnection]) -> AnyConnection:
        """Connect, log in and load the scripts."""
        connection = await open_connection(self._settings, address, self._response_timeout, kind)
        try:
            await self._shake_hands(connection, address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _detach(self, connection: Connection | None) -> None:
        """Stop using a shared connection after the slot has moved. Do nothing if it is no longer the current one.

        Requests in flight still get their replies, unless no other Client uses the connection: then it is closed.
        """
        if self._shared is None or connection is None or connection is not self._connection:
            return
        self._connection = None
        for callback in self._loss_callbacks:
            connection.forget_loss(callback)
        self._shared.detach(connection)
        for callback in self._loss_callbacks:
            callback()

    async def _shake_hands(self, connection: Connection, address: Address) -> None:
        settings = self._settings
        logins = await log_in(connection, settings, address)
        requests: list[asyncio.Future[Reply]] = [*logins]
        if settings.db:
            requests.append(connection.ask("SELECT", settings.db))
        if settings.kind == "sentinel":
            requests.append(connection.ask("ROLE"))
        courtesy = connection.ask("CLIENT", "SETNAME", settings.client_name)
        loads = [connection.ask("SCRIPT", "LOAD", script.text) for script in self._scripts]
        # The first error is reported: it causes the others.
        sent = (*requests, courtesy, *loads)
        for request, reply in zip(sent, await asyncio.gather(*sent, return_exceptions=True), strict=True):
            if isinstance(reply, ServerError) and reply.remedy is Remedy.NONE and request is courtesy:
                continue  # an ACL may forbid CLIENT, and the name is optional
            if isinstance(reply, ServerError) and request in logins:
                raise refused_login(reply) from None
            if isinstance(reply, BaseException) and not (request in loads and self._is_bearable(reply)):
                raise reply
        if settings.kind == "sentinel" and requests[-1].result()[0] != b"master":
            # Not all sentinels know about the failover yet.
            raise Unreachable(f"{address} is not a master")

    def _is_bearable(self, refusal: BaseException) -> bool:
        """Return True if the user may not load scripts and this client works without them."""
        return self._may_lack_scripts and isinstance(refusal, ServerError) and refusal.kind == "NOPERM"

    async def _follow_ask(self, error: ServerError, packed: bytes) -> Reply:
        """Send one request to the node that an ASK error names."""
        connection = await self.asking(error)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        connection.request(packed, future_setter(future))
        return await future

    async def asking(self, error: ServerError) -> Connection:
        """Return a connection to the node that an ASK error names: the keys have moved, their slot has not yet.

        Send only requests on it that got the error: for a key that has not moved, the node would create a second one.
        """
        address = _moved_address(str(error).split()[2], self._settings)
        if (known := self._known_asking(address)) is not None:
            return known
        connection: Connection = await self._log_in(address, AskingConnection)
        if (known := self._known_asking(address)) is not None or self._closed:  # another caller was faster
            connection.close()
            return known or connection
        self._stop_asking()
        self._asking = (address, connection)
        return connection

    def _known_asking(self, address: Address) -> Connection | None:
        asking = self._asking
        return asking[1] if asking is not None and asking[0] == address and asking[1].is_up else None

    def _stop_asking(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            asking[1].close()


async def _nothing(connection: Connection) -> None:
    """Do nothing: the default preparation."""


def _moved_address(text: str, settings: ConnectionSettings) -> Address:
    host, _, port = text.rpartition(":")
    # An empty host means the host of the current connection.
    fallback = settings.addresses[0] if settings.addresses else Address()
    return replace(fallback, host=host or fallback.host, port=int(port))


_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: Kept alive: garbage collection would touch sockets and loops that belong to another process or thread.
_left_alone: list[Connection] = []


def _after_fork_in_child() -> None:
    for client in list(_open_clients):
        client.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
