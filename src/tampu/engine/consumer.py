"""The consumer: reads jobs, runs the handler, settles what came of it; with a promoter and a scheduler beside it.

```
reader ──► pool of handlers ──► settler ──► acked and deleted, or a retry, or a dead letter
   ▲                │
   └── reclaim      └── leases (a thread): what is running or held here stays ours
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tampu.clock import wall_clock_ms
from tampu.engine import outcomes
from tampu.engine.callers import in_process, in_thread, is_coroutine_handler, on_loop
from tampu.engine.config import ConsumerConfig, PromoterConfig
from tampu.engine.delivery import Delivery
from tampu.engine.leases import Leases
from tampu.engine.metrics import DlqRouted, MetricsSink, ReaderBatch, RetryScheduled
from tampu.engine.pool import Pool
from tampu.engine.processes import Processes, refuse_inside_starting_child
from tampu.engine.promoter import PROMOTER_SCRIPTS, PromoterLoop
from tampu.engine.reader import RECLAIM, Reader
from tampu.engine.runner import Runner, max_attempts_of
from tampu.engine.scheduler import SCHEDULER_SCRIPTS, SchedulerLoop
from tampu.engine.settle import ACK, SETTLE, SETTLE_UNDER_OOM, Settler
from tampu.engine.supervise import supervise
from tampu.errors import DecodeError
from tampu.redis.capabilities import Capabilities, probe_capabilities
from tampu.redis.pipe import Pipe
from tampu.redis.scripts import load_script
from tampu.redis.settings import parse_url
from tampu.wire.dlq import MISSING_PAYLOAD, DlqReason
from tampu.wire.entry import first_values, read_job_fields, text_or_empty
from tampu.wire.envelope import decode_job, encode_job
from tampu.wire.job import Job
from tampu.wire.keys import QueueKeys
from tampu.wire.typed import TypedPayload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.engine.outcomes import Outcome
    from tampu.redis.connection import Part
    from tampu.redis.settings import ConnectionSettings, CredentialCallback

logger = logging.getLogger("tampu.worker")

HAND_BACK = load_script("hand_back")
FORGET_CONSUMER = load_script("forget_consumer")

#: A consumer name that holds nothing and has been silent for so long belongs to a worker that died, in ms.
SILENT_CONSUMER_MS = 10 * 60 * 1000
#: How often such names are looked for, in seconds.
SWEEP_INTERVAL_SECS = 60.0
#: How long a read may take beyond its BLOCK before the connection counts as lost, in seconds.
READ_MARGIN_SECS = 5.0
#: Entries handed back in one call.
HAND_BACK_BATCH = 100


class Consumer:
    """Runs a handler for the jobs of one queue until it is told to stop."""

    def __init__(
        self,
        url: str,
        config: ConsumerConfig | None = None,
        *,
        credential_provider: CredentialCallback | None = None,
    ) -> None:
        self._settings = parse_url(url, credential_provider=credential_provider)
        self._config = config or ConsumerConfig()
        self._running: _Running | None = None

    @property
    def last_read_at(self) -> float | None:
        """When a server last answered a read, by the monotonic clock; None before the first."""
        return None if self._running is None else self._running.last_read_at

    @property
    def is_healthy(self) -> bool:
        """False while a handler has blocked the event loop for longer than `max_block_ms`."""
        return self._running is None or self._running.is_healthy

    async def run(
        self,
        handler: Callable[[Job[Any]], Awaitable[bytes | None] | bytes | None],
        shutdown: asyncio.Event,
        *,
        process: bool = False,
        timeout_secs: float | None = None,
    ) -> None:
        """Work until `shutdown` is set, then drain within `shutdown_deadline_secs`.

        `handler` is an `async def (job) -> bytes | None`; a plain `def` runs in a thread. With `process=True` either
        runs in a process of its own and must be importable there. A run longer than `timeout_secs` has failed.
        """
        refuse_inside_starting_child()
        with ThreadPoolExecutor(self._config.concurrency, "tampu-handler") as threads:
            processes = Processes(handler, threads) if process else None
            if processes is not None:
                caller = in_process(processes, timeout_secs)
            elif is_coroutine_handler(handler):
                caller = on_loop(handler, timeout_secs)
            else:
                caller = in_thread(handler, threads, timeout_secs)
            try:
                self._running = _Running(self._settings, self._config, caller)
                await self._running.run(shutdown)
            finally:
                self._running = None
                if processes is not None:
                    processes.close()


class _Running:
    """One run of a consumer: its parts and how they are wired."""

    def __init__(
        self, settings: ConnectionSettings, config: ConsumerConfig, handler: Callable[[Job[Any]], Awaitable[Any]]
    ) -> None:
        self._config = config
        self._keys = keys = QueueKeys(config.queue_name)
        tag = keys.tag.encode()
        scripts = (
            *(SETTLE, ACK, RECLAIM, HAND_BACK, FORGET_CONSUMER),
            *(script for script in {*PROMOTER_SCRIPTS, *SCHEDULER_SCRIPTS}),
        )
        self._pipe = Pipe(settings, tag, scripts)
        read_timeout = config.block_ms / 1000 + READ_MARGIN_SECS
        self._read_pipe = Pipe(settings, tag, response_timeout_secs=read_timeout)
        #: Everything delivered to us and not settled: whose leases are renewed, and which is never started twice.
        self._held: dict[bytes, Delivery] = {}
        self._settler = Settler(self._pipe, keys, config, self._on_settled)
        self._runner = Runner(handler, config, self._settler)
        self._pool = Pool(config.concurrency, self._runner.run)
        self._reader = Reader(
            self._read_pipe,
            self._pipe,
            keys,
            config,
            self._pool,
            self._settler,
            self._held,
            self._receive,
            self._on_batch,
            self._on_drained,
        )
        self._leases = Leases(settings, keys, config, self._held, self._on_lost)
        self._metrics: MetricsSink = config.metrics
        self._stopping = asyncio.Event()
        self._capabilities: Capabilities | None = None
        self._decode_payload = None
        if config.payload_type is not None:
            self._decode_payload = TypedPayload(config.payload_type).decode_slot

    @property
    def last_read_at(self) -> float | None:
        return self._reader.last_read_at

    @property
    def is_healthy(self) -> bool:
        return self._leases.is_healthy

    # --- running and stopping

    async def run(self, shutdown: asyncio.Event) -> None:
        loops: dict[str, asyncio.Task[None]] = {}
        try:
            await self._start()
            loops = {name: asyncio.create_task(loop, name=name) for name, loop in self._loops().items()}
            await shutdown.wait()
        finally:
            await self._stop(loops)

    async def _start(self) -> None:
        connection = await self._pipe.up(patience_secs=3600)
        self._capabilities = await probe_capabilities(connection, self._keys.tag)
        if self._capabilities.script_flags:
            self._pipe.add_script(SETTLE_UNDER_OOM)
            await self._pipe.load_scripts()
        self._settler.use(xackdel=self._capabilities.xackdel, script_flags=self._capabilities.script_flags)
        await supervise("making the group", self._make_group, lambda: self._group_is_made)
        self._leases.start()

    _group_is_made = False

    async def _make_group(self) -> None:
        await self._reader.make_group()
        self._group_is_made = True

    def _loops(self) -> dict[str, Any]:
        config = self._config
        is_over = self._stopping.is_set
        loops: dict[str, Any] = {
            "tampu-reader": supervise("reader", self._reader.read_once, is_over),
            "tampu-reclaim": supervise("taking over idle jobs", self._reader.reclaim_round, is_over),
            "tampu-sweeper": supervise("sweeping consumer names", self._sweep_consumers, is_over),
            "tampu-pause": supervise("watching for a pause", self._reader.watch_pause, is_over),
        }
        if config.delayed_enabled:
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
            loops["tampu-promoter"] = PromoterLoop(self._pipe, promoter).run(self._stopping)
        if config.run_scheduler:
            scheduler = replace(config.scheduler, queue_name=config.queue_name)
            loops["tampu-scheduler"] = SchedulerLoop(self._pipe, scheduler).run(self._stopping)
        return loops

    async def _stop(self, loops: dict[str, asyncio.Task[None]]) -> None:
        """Stop reading, hand back what was not started, finish or abandon the rest, settle, leave no trace."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.shutdown_deadline_secs
        self._stopping.set()
        await self._reader.stop()
        for name in ("tampu-reclaim", "tampu-sweeper"):
            if name in loops:
                loops[name].cancel()
        if "tampu-reader" in loops:  # its last batch may still come
            await asyncio.wait([loops["tampu-reader"]], timeout=1)
        await self._quietly(self._hand_back(self._pool.take_back()))
        # Promoter and scheduler release their locks.
        _, late = await asyncio.wait(loops.values(), timeout=2) if loops else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*loops.values(), return_exceptions=True)
        abandoned = await self._pool.finish(max(deadline - loop.time(), 0))
        if abandoned:
            logger.warning("%d handlers did not end in time and were abandoned; their jobs run elsewhere", abandoned)
        if not await self._settler.drain(max(deadline - loop.time(), 1)):
            logger.error("not everything could be settled in time; what is left runs elsewhere")
        self._settler.close()
        await self._leases.stop()
        await self._quietly(self._hand_back_undelivered())
        await self._quietly(self._forget_name())
        await self._read_pipe.close()
        await self._pipe.close()

    async def _quietly(self, work: Awaitable[Any]) -> None:
        """Courtesies at the end: when the server is away, what they would do happens by itself a little later."""
        try:
            await asyncio.wait_for(work, 5)
        except Exception as error:
            logger.info("left undone at shutdown: %s", error)

    async def _hand_back(self, deliveries: list[Delivery]) -> None:
        """Give back what was not started, so that it starts elsewhere at once and not when its lease runs out."""
        for start in range(0, len(deliveries), HAND_BACK_BATCH):
            batch = deliveries[start : start + HAND_BACK_BATCH]
            arguments = self._hand_back_head()
            for delivery in batch:
                # A suspect's earlier runs are known to the pending list only, which it now leaves.
                envelope = encode_job(delivery.job) if delivery.is_suspect else b""
                arguments += (delivery.entry_id, envelope)
            await self._pipe.run(HAND_BACK, (self._keys.stream,), arguments, resend=False)
            for delivery in batch:
                self._held.pop(delivery.entry_id, None)

    async def _hand_back_undelivered(self) -> None:
        """Entries the server gave us in a reply that never came: they are ours by its books, and nobody runs them."""
        pending = await self._pipe.call(
            "XPENDING", self._keys.stream, self._config.group, "-", "+", 1000, self._config.consumer_id
        )
        arguments = self._hand_back_head()
        for entry_id, _, _, deliveries in pending:
            if entry_id not in self._held and deliveries == 1:
                arguments += (entry_id, b"")
        if len(arguments) > 3:
            await self._pipe.run(HAND_BACK, (self._keys.stream,), arguments, resend=False)

    def _hand_back_head(self) -> list[Part]:
        native = self._capabilities is not None and self._capabilities.xackdel
        return [self._config.group, self._config.consumer_id, "1" if native else "0"]

    async def _forget_name(self) -> None:
        await self._pipe.run(
            FORGET_CONSUMER, (self._keys.stream,), (self._config.group, self._config.consumer_id, SILENT_CONSUMER_MS)
        )

    async def _sweep_consumers(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), SWEEP_INTERVAL_SECS)
            return
        await self._pipe.run(FORGET_CONSUMER, (self._keys.stream,), (self._config.group, "", SILENT_CONSUMER_MS))

    # --- what the parts tell each other

    def _receive(self, entry_id: bytes, fields: list[bytes], earlier_deliveries: int) -> Delivery | None:
        """Decode one entry; what cannot be run becomes a dead letter with all that is known of it."""
        if entry_id in self._held:
            return None  # it runs here already
        envelope, name = read_job_fields(fields or [])
        if envelope is None:
            self._reject(entry_id, DlqReason.MALFORMED, fields, detail=MISSING_PAYLOAD)
            return None
        if len(envelope) > self._config.max_payload_bytes:
            self._reject(entry_id, DlqReason.OVERSIZE_PAYLOAD, fields)
            return None
        try:
            job = decode_job(envelope, name)
        except DecodeError as error:
            self._reject(entry_id, DlqReason.DECODE_FAILED, fields, detail=str(error))
            return None
        if self._decode_payload is not None:
            job._decode = self._decode_payload
        job.attempt += earlier_deliveries
        delivery = Delivery(entry_id, job, earlier_deliveries)
        self._held[entry_id] = delivery
        if job.attempt >= max_attempts_of(job, self._config):
            detail = "the worker died with it" if earlier_deliveries else None
            self._settler.add(self._letter(delivery, DlqReason.RETRIES_EXHAUSTED, detail=detail))
            return None
        return delivery

    def _reject(
        self, entry_id: bytes, reason: DlqReason, fields: list[bytes] | None, *, detail: str | None = None
    ) -> None:
        values = first_values(fields or [])
        job: Job[Any] = Job.from_wire("", b"\xc0", 0, 0, None, text_or_empty(values.get(b"n")))
        delivery = Delivery(entry_id, job, 0)
        self._held[entry_id] = delivery
        original = None
        if reason is DlqReason.MALFORMED:
            flat = fields or []
            original = tuple(zip(flat[::2], flat[1::2], strict=False))
        self._settler.add(
            self._letter(delivery, reason, detail=detail, envelope=values.get(b"d", b""), original=original)
        )

    def _letter(
        self,
        delivery: Delivery,
        reason: DlqReason,
        *,
        detail: str | None = None,
        envelope: bytes | None = None,
        original: tuple[tuple[bytes, bytes], ...] | None = None,
    ) -> Outcome:
        return outcomes.dead_letter(
            delivery,
            wall_clock_ms(),
            0,
            reason=reason,
            worker=self._config.consumer_id,
            detail=detail,
            ran=False,
            envelope=envelope,
            original=original,
        )

    def _on_settled(self, outcome: Outcome, code: str) -> None:
        delivery = outcome.delivery
        self._held.pop(delivery.entry_id, None)
        if code != "k" or outcome.kind in (b"s", b"r"):
            return
        job = delivery.job
        if outcome.kind == b"t":
            self._tell(
                lambda: self._metrics.retry_scheduled(RetryScheduled(job.attempt + 2, outcome.extra[1], job.name))
            )
        elif outcome.dlq_reason is not None:
            reason = outcome.dlq_reason
            self._tell(lambda: self._metrics.dlq_routed(DlqRouted(reason, outcome.runs, job.name)))

    def _on_batch(self, size: int, reclaimed: int) -> None:
        self._tell(lambda: self._metrics.reader_batch(ReaderBatch(size, reclaimed)))

    def _on_drained(self) -> None:
        self._settler.drained(wall_clock_ms())

    def _on_lost(self, entry_ids: list[bytes]) -> None:
        """Leases that are gone: what waits is dropped, what runs is left to finish."""
        for entry_id in entry_ids:
            delivery = self._held.get(entry_id)
            if delivery is None:
                continue
            delivery.is_lost = True
            if not delivery.is_running:
                del self._held[entry_id]
            logger.warning("the lease of job %s (%s) was lost", delivery.job.id, entry_id.decode())

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("the metrics sink failed; no job is affected")
