"""The consumer: runs the jobs of one queue with a handler that takes and returns bytes, on the runtime of `Worker`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.config import ConsumerConfig
from tampu.consume.execute import Target, decode_first
from tampu.consume.handlers import is_coroutine_handler
from tampu.consume.pool import DaemonThreads
from tampu.consume.processes import Processes, call_typed
from tampu.consume.runtime import Runtime
from tampu.errors import ConfigError
from tampu.redis.settings import parse_url
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from tampu.redis.settings import CredentialCallback
    from tampu.wire.job import Job


class Consumer:
    """Runs a handler for the jobs of one queue until it is asked to stop.

    `url` is the server's URL. `credential_provider` returns the user name and password for each new connection.
    Raises `ConfigError` if the URL or a setting is not allowed.
    """

    def __init__(
        self,
        url: str,
        config: ConsumerConfig | None = None,
        *,
        credential_provider: CredentialCallback | None = None,
    ) -> None:
        self._settings = parse_url(url, credential_provider=credential_provider)
        self._config = config = config or ConsumerConfig()
        if config.payload_type is not None:
            TypedPayload(config.payload_type)  # raises for a type that cannot be decoded
        self._running: Runtime | None = None
        #: Handlers that were still running at the deadline of the last shutdown.
        self.abandoned = 0

    @property
    def last_read_at(self) -> float | None:
        """Return when the server last answered a read, by the monotonic clock; None before the first answer."""
        return None if self._running is None else self._running.last_read_at

    @property
    def is_healthy(self) -> bool:
        """Return False while a handler blocks the event loop for over `max_block_ms`, or leases cannot be renewed."""
        return self._running is None or self._running.is_healthy

    async def run(
        self,
        handler: Callable[[Job[Any]], Awaitable[bytes | None] | bytes | None],
        shutdown: asyncio.Event,
        *,
        process: bool = False,
        timeout_secs: float | None = None,
    ) -> None:
        """Run jobs until `shutdown` is set, then drain within `shutdown_deadline_secs`.

        `handler` is an `async def (job) -> bytes | None`; a plain `def` runs in a thread. With `process=True` either
        one runs in a separate process and must be importable there. A run that exceeds `timeout_secs` fails, except in
        a thread, which cannot be stopped. Raises `ConfigError` if the handler cannot run in a process, and `RedisError`
        if the server rejects the login.
        """
        threads = DaemonThreads(self._config.concurrency, "tampu-handler")
        processes = None
        if process:
            if self._config.codec is not None:
                raise ConfigError("a Consumer with a codec cannot run its handler in a process: use a task of a Queue")
            typed = self._config.payload_type
            processes = Processes(handler if typed is None else partial(call_typed, handler, typed), threads)
        target = Target(
            handler,
            threads=None if process or is_coroutine_handler(handler) else threads,
            processes=processes,
            timeout_secs=timeout_secs,
            # With a codec, a handler that does not look at the payload must not run a forged job.
            open_first=None if self._config.codec is None else decode_first,
        )
        try:
            self._running = runtime = Runtime(self._config)
            link = runtime.link(self._settings, self._config.queue_name)
            served = runtime.add(link, self._config.queue_name, target.start)
            if processes is not None:
                served.admission.reserve = lambda job: processes.reserve()
            await runtime.run(shutdown)
        finally:
            if self._running is not None:
                self.abandoned = self._running.abandoned
            self._running = None
            if processes is not None:
                processes.close()
            threads.shutdown()
