"""The consumer: reads jobs, runs the handler and settles the outcomes. It also runs a promoter and a scheduler.

```
reader ──► pool of handlers ──► settler ──► acked and deleted, or a retry, or a dead letter
   ▲                │
   └── reclaim      └── leases (a thread): renewed for every entry in flight
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tampu.config import ConsumerConfig, PromoterConfig
from tampu.consume.cancels import Cancels
from tampu.consume.heartbeat import HeartbeatLoop
from tampu.consume.inflight import InFlight
from tampu.consume.invoke import DaemonThreads, in_process, in_thread, is_coroutine_handler, on_loop
from tampu.consume.job_log import JobLog
from tampu.consume.leases import Leases
from tampu.consume.pool import Pool
from tampu.consume.processes import Processes, call_typed, refuse_inside_starting_child
from tampu.consume.reader import Reader
from tampu.consume.runner import Runner
from tampu.consume.settle import ACK, SETTLE, SETTLE_UNDER_OOM, Settler
from tampu.consume.starts import StartMarks
from tampu.inspect.snapshot import read_depth
from tampu.maintain.promoter import PromoterLoop
from tampu.maintain.scheduler import SchedulerLoop
from tampu.maintain.supervise import supervise
from tampu.metrics import MetricsSink, tell
from tampu.redis import calls
from tampu.redis.capabilities import probe_capabilities
from tampu.redis.client import Client
from tampu.redis.faults import PASSING, ServerError
from tampu.redis.settings import parse_url
from tampu.wire.keys import QueueKeys
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.consume.inflight import Delivery
    from tampu.consume.on_failure import FailureCalls
    from tampu.redis.connection import Connection
    from tampu.redis.settings import ConnectionSettings, CredentialCallback
    from tampu.wire.job import Job

logger = logging.getLogger("tampu.worker")

#: A consumer with nothing pending that has been idle this long belongs to a dead worker, in milliseconds.
SILENT_CONSUMER_MS = 10 * 60 * 1000
#: How often the names of dead consumers are removed, in seconds.
SWEEP_INTERVAL_SECS = 60.0
#: How long a read may take beyond its BLOCK time before the connection counts as lost, in seconds.
READ_MARGIN_SECS = 5.0
#: How often a worker checks whether the queue is paused and which jobs are to be cancelled, in seconds.
LOOK_SECS = 1.0
#: How often the length of the queue is measured for metrics, in seconds.
MEASURE_SECS = 5.0
#: How long a shutdown may keep settling and cleaning up after its deadline, and how long each cleanup step may take, in
#: seconds.
CLEANUP_SECS = 1.0


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
        typed = config.payload_type
        self._decode_payload = None if typed is None else TypedPayload(typed).decode_slot
        self._running: _Running | None = None
        #: The calls of `on_failure`; None if there are none.
        self.failure_calls: FailureCalls | None = None
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

    def running_deliveries(self) -> list[Delivery]:
        """Return the deliveries whose handlers are running. May be called from any thread."""
        return [] if self._running is None else self._running.running_deliveries()

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
        one runs in a separate process and must be importable there. A run that exceeds `timeout_secs` fails. Raises
        `ConfigError` if the handler cannot run in a process, and `RedisError` if the server rejects the login.
        """
        refuse_inside_starting_child()
        threads = DaemonThreads(self._config.concurrency, "tampu-handler")
        processes = None
        if process:
            typed = self._config.payload_type
            processes = Processes(handler if typed is None else partial(call_typed, handler, typed), threads)
            caller = in_process(processes, timeout_secs)
        elif is_coroutine_handler(handler):
            caller = on_loop(handler, timeout_secs)
        else:
            caller = in_thread(handler, threads, timeout_secs)
        try:
            self._running = _Running(self._settings, self._config, caller, self._decode_payload, self.failure_calls)
            await self._running.run(shutdown)
        finally:
            if self._running is not None:
                self.abandoned = self._running.abandoned
            self._running = None
            if processes is not None:
                processes.close()
            threads.shutdown()


class _Running:
    """Wires the parts of one run of a consumer."""

    def __init__(
        self,
        settings: ConnectionSettings,
        config: ConsumerConfig,
        handler: Callable[[Job[Any]], Awaitable[Any]],
        decode_payload: Callable[[bytes], Any] | None,
        failure_calls: FailureCalls | None,
    ) -> None:
        self._config = config = replace(config, metrics=config.metrics.for_queue(config.queue_name))
        self._keys = keys = QueueKeys(config.queue_name)
        tag = keys.tag.encode()
        scripts = (SETTLE, ACK, *calls.CONSUMER_SCRIPTS, *calls.SCHEDULER_SCRIPTS)
        self._client = Client(settings, tag, scripts)
        # A dedicated connection: otherwise outcomes would wait behind promotions of hundreds of jobs.
        self._promoter_client = Client(settings, tag, calls.PROMOTER_SCRIPTS) if config.delayed_enabled else None
        read_timeout = config.block_ms / 1000 + READ_MARGIN_SECS
        self._read_client = Client(settings, tag, response_timeout_secs=read_timeout)
        self._settler = Settler(self._client, keys, config)
        self._log = log = JobLog(config.queue_name)
        self._inflight = InFlight(self._client, keys, config, self._settler.add, decode_payload, log)
        self._settler.on_settled = self._inflight.settled
        self._failure_calls = failure_calls
        if failure_calls is not None:
            self._inflight.on_dead_letter = failure_calls
        self._heartbeat = HeartbeatLoop(self._client, keys, config, self._inflight)
        self._client.prepare_with(self._learn_capabilities)
        self._leases = Leases(settings, self._client, keys, config, self._inflight)
        starts = StartMarks(self._client, keys, config, self._inflight)
        self._cancels = Cancels(self._client, keys, config, self._inflight)
        self._runner = Runner(handler, config, self._settler, self._leases, starts, self._cancels, log)
        self._pool = Pool(config.concurrency, self._runner.run)
        self._reader = Reader(
            self._read_client,
            self._client,
            keys,
            config,
            self._pool,
            self._settler,
            self._inflight,
            self._leases,
        )
        self._stopping = asyncio.Event()
        self._is_prepared = False
        self._cleanup_ends_at = 0.0
        self.abandoned = 0

    @property
    def last_read_at(self) -> float | None:
        return self._reader.last_read_at

    @property
    def is_healthy(self) -> bool:
        return self._leases.is_healthy

    def running_deliveries(self) -> list[Delivery]:
        return self._inflight.running_deliveries()

    # --- running and stopping

    async def run(self, shutdown: asyncio.Event) -> None:
        loops: dict[str, asyncio.Task[None]] = {}
        try:
            if await self._start_unless(shutdown):
                loops = {name: asyncio.create_task(loop, name=name) for name, loop in self._loops().items()}
                await shutdown.wait()
        finally:
            await self._stop(loops)

    async def _start_unless(self, shutdown: asyncio.Event) -> bool:
        """Start, however long the server is unreachable. Return False if `shutdown` was set first."""
        starting, stopping = asyncio.ensure_future(self._start()), asyncio.ensure_future(shutdown.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return starting.done()
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _start(self) -> None:
        # A wrong password raises at once; an unreachable server is waited for.
        await self._client.up(patience_secs=3600)
        await supervise("startup", self._prepare, lambda: self._is_prepared)
        self._leases.start()

    async def _prepare(self) -> None:
        await self._reader.make_group()
        await self._look()
        self._is_prepared = True

    async def _learn_capabilities(self, connection: Connection) -> None:
        """Probe the server's capabilities on each connection: another server may have taken over the address."""
        try:
            capabilities = await probe_capabilities(connection, self._keys.tag, adds=False)
        except ServerError as error:
            if error.kind not in PASSING:
                raise
            return  # such as out of memory: keep what is known
        if capabilities.script_flags:
            await connection.ask("SCRIPT", "LOAD", SETTLE_UNDER_OOM.text)
        self._settler.use(xackdel=capabilities.xackdel, script_flags=capabilities.script_flags)
        self._inflight.has_xackdel = capabilities.xackdel

    def _loops(self) -> dict[str, Any]:
        config = self._config
        is_over = self._stopping.is_set
        loops: dict[str, Any] = {
            "tampu-reader": supervise("reader", self._reader.read_once, is_over),
            "tampu-reclaim": supervise("takeover of jobs", self._reader.takeover.one_round, is_over),
            "tampu-unheld": supervise("hand-back of late entries", self._reader.watch_unheld, is_over),
            "tampu-sweeper": supervise("removal of dead consumers", self._sweep_consumers, is_over),
            "tampu-heartbeat": supervise("heartbeat", self._beat, is_over),
            "tampu-watch": supervise("check for pauses and cancels", self._watch, is_over),
        }
        if type(config.metrics).queue_depth is not MetricsSink.queue_depth:
            loops["tampu-depth"] = supervise("measurement of the queue", self._measure, is_over)
        if self._promoter_client is not None:
            promoter = PromoterConfig(
                queue_name=config.queue_name,
                poll_interval_ms=config.delayed_poll_interval_ms,
                promote_batch=config.delayed_promote_batch,
                max_stream_len=config.delayed_max_stream_len,
                lock_ttl_secs=config.delayed_lock_ttl_secs,
                holder_id=config.consumer_id,
                events_enabled=config.events_enabled,
                events_max_stream_len=config.events_max_stream_len,
                dlq_max_stream_len=config.dlq_max_stream_len,
                metrics=config.metrics,
            )
            loops["tampu-promoter"] = PromoterLoop(self._promoter_client, promoter).run(self._stopping)
        if config.run_scheduler:
            scheduler = replace(config.scheduler, queue_name=config.queue_name)
            loops["tampu-scheduler"] = SchedulerLoop(self._client, scheduler).run(self._stopping)
        return loops

    async def _measure(self) -> None:
        """Report the length of the queue to the metrics sink, then wait."""
        running = len(self._inflight.running_deliveries())
        depth = await read_depth(self._client, self._keys, running=running, concurrency=self._config.concurrency)
        tell(self._config.metrics.queue_depth, depth)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), MEASURE_SECS)

    async def _beat(self) -> None:
        await self._heartbeat.beat(self._stopping)

    async def _watch(self) -> None:
        """Check for pauses and cancels, then wait for a second."""
        await self._look()
        self._log.flush()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), LOOK_SECS)

    async def _look(self) -> None:
        """Read, in one request, whether the queue or a task is paused and which jobs are to be cancelled."""
        keys = self._keys
        commands = [("EXISTS", keys.paused), ("HGETALL", keys.paused_tasks), self._cancels.command]
        paused, tasks, marks = await self._client.call_many(commands)
        await self._reader.note_pause(bool(paused))
        self._runner.paused.learn(tasks, await self._client.server_time_ms() if tasks else 0)
        await self._cancels.learn(marks)

    async def _stop(self, loops: dict[str, asyncio.Task[None]]) -> None:
        """Stop reading, hand back unstarted jobs, finish or abandon running ones, settle, remove the consumer name."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.shutdown_deadline_secs
        self._cleanup_ends_at = deadline + CLEANUP_SECS
        self._stopping.set()  # promoter and scheduler release their locks
        await self._best_effort(self._inflight.hand_back, self._pool.take_back())
        if loops:
            await self._reader.stop(loops["tampu-reader"], loops["tampu-reclaim"])
        await self._best_effort(self._inflight.hand_back, self._pool.take_back())  # delivered meanwhile
        await self._read_client.close()
        await self._best_effort(self._reader.hand_back_missed)
        await self._pool.finish(deadline - loop.time())
        self._runner.is_stopping = True
        for job in self._inflight.running():
            self._log.abandoned(job)
        self.abandoned = await self._pool.end()
        await self._best_effort(self._inflight.hand_back, self._runner.unstarted)
        if self.abandoned:
            logger.warning(
                "abandoned %d job%s that did not end in time (shutdown_deadline_secs is %g); another worker will retry "
                "after %g s",
                *(self.abandoned, "" if self.abandoned == 1 else "s"),
                *(self._config.shutdown_deadline_secs, self._config.claim_min_idle_ms / 1000),
            )
        if not await self._settler.drain(self._cleanup_secs_left()):
            logger.error("not all outcomes were settled in time; another worker will run those jobs again")
        self._settler.close()
        if self._failure_calls is not None:
            await self._failure_calls.finish(self._cleanup_secs_left())
        await self._leases.stop()
        if loops:
            _, late = await asyncio.wait(loops.values(), timeout=self._cleanup_secs_left())
            for task in late:
                task.cancel()
            await asyncio.gather(*loops.values(), return_exceptions=True)
        if self._promoter_client is not None:
            await self._promoter_client.close()
        await self._best_effort(self._forget_name)
        await self._client.close()

    def _cleanup_secs_left(self) -> float:
        return max(self._cleanup_ends_at - asyncio.get_running_loop().time(), 0.05)

    async def _best_effort(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run one cleanup step. If the server is unreachable, expiring leases have the same effect a little later."""
        if self._client.connection is None:
            return
        try:
            await asyncio.wait_for(work(*args), min(self._cleanup_secs_left(), CLEANUP_SECS))
        except Exception as error:
            logger.info("skipped a cleanup step at shutdown: %s: %s", type(error).__name__, error)

    async def _forget_name(self) -> None:
        names = {"group": self._config.group, "consumer": self._config.consumer_id}
        await self._heartbeat.stop()
        await calls.forget_consumer(self._client, self._keys.stream, **names)
        await self._leases.release_name()

    async def _sweep_consumers(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), SWEEP_INTERVAL_SECS)
            return
        await calls.forget_idle_consumers(
            self._client, self._keys.stream, group=self._config.group, min_idle_ms=SILENT_CONSUMER_MS
        )
