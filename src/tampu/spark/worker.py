"""Workers on Spark: a normal worker in every slot of a cluster, for work that needs more than one machine.

    from app import queue
    SparkWorker(spark, "app:queue").run()          # or: tampu worker app:queue --on spark --master spark://...

Each task of one long Spark job is a normal worker: reads, leases, results, retries, dead letters and events are the
same code. Spark places the tasks, ships the handler, and restarts a task elsewhere when an executor dies. Other workers
take over its jobs, as those of any dead worker: nothing is lost, and a job may run twice.

The tasks live as long as a key that the driver renews. When the driver ends or dies, they finish and settle their
running jobs and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tampu.base.checks import shown
from tampu.base.event_loop import new_event_loop
from tampu.base.targets import load_target as load_object
from tampu.errors import ConfigError, RedisError
from tampu.queue import Queue
from tampu.redis.client import Client
from tampu.redis.settings import URL_VARIABLE, parse_url, resolve_url
from tampu.spark.options import check_shared_url
from tampu.spark.server import QueueServer
from tampu.spark.session import spark_session
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tampu.config import ConsumerConfig

logger = logging.getLogger("tampu.spark")

#: TTL of the key that keeps the tasks alive, in seconds; it is renewed at a third of that.
ALIVE_SECS = 30
#: How often a task checks the key, in seconds.
WATCH_SECS = 0.5
#: How long executors may take to register, in seconds.
REGISTERING_SECS = 60.0
#: A Spark job that fails within this time, in seconds, this many times in a row, is not restarted.
QUICK_FAILURE_SECS = 20.0
MAX_QUICK_FAILURES = 3


@dataclass(frozen=True)
class SlotSpec:
    """Plan of the worker in a slot. Sent to the executors."""

    url: str
    #: The key that keeps the worker alive, and the queue whose server holds it.
    alive_key: str
    queue: str
    #: `module:attribute` of a Queue with tasks, or a handler with its settings.
    target: str | None = None
    handler: Callable[..., Any] | None = None
    config: ConsumerConfig | None = None
    #: Settings of the Worker that runs the target's tasks.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Server of queues without a URL. The environment of an executor may name another one.
    default_url: str = ""
    #: First folder on the driver's module path.
    folder: str = ""


class SparkWorker:
    """Runs a queue's jobs on the executors of a Spark session.

    | call | what runs |
    |---|---|
    | `SparkWorker(spark, "app:queue")` | the tasks of the `Queue` (or list of them) `queue` of `app`, imported there |
    | `SparkWorker(spark, "app:queue", settings={"concurrency": 8})` | the same with settings for `Worker` |
    | `SparkWorker(spark, handler=f, config=ConsumerConfig(...), url=...)` | `f(job)`, shipped from here |
    """

    def __init__(
        self,
        spark: SparkSession,
        target: str | None = None,
        *,
        handler: Callable[..., Any] | None = None,
        config: ConsumerConfig | None = None,
        url: str | None = None,
        slots: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if (target is None) == (handler is None):
            raise ConfigError("pass either a target such as 'app:queue' or handler=..., not both")
        if handler is not None and config is None:
            raise ConfigError("handler=... needs config=ConsumerConfig(queue_name=...)")
        if handler is not None and settings:
            raise ConfigError(
                "settings=... can only be used with a target; put the settings of a handler into config=..."
            )
        if slots is not None and slots < 1:
            raise ConfigError(f"slots must be 1 or more; got {slots}")
        self._spark = spark
        if target is not None:
            first, *_ = load_target(target)
            queue_name, server_url = first.name, first.url
        else:
            assert config is not None  # noqa: S101 - checked above; for the type checker
            queue_name, server_url = config.queue_name, resolve_url(url)
        #: Name of this group of workers; consumer names start with it.
        self.id = f"spark-{uuid.uuid4().hex[:12]}"
        keys = QueueKeys(queue_name)
        self._spec = SlotSpec(
            url=check_shared_url(server_url, "url"),
            alive_key=f"{keys.tag}:sparkw:{self.id}",
            queue=queue_name,
            target=target,
            handler=handler,
            config=config,
            settings=dict(settings or {}),
            default_url=resolve_url(url),
            folder=os.getcwd(),
        )
        cores = cores_of(spark)
        #: Number of concurrent workers.
        self.slots = slots or cores
        if self.slots > cores:
            logger.warning("%d slots on %d cores: Spark starts the others when a core is free", self.slots, cores)
        self._stopping = threading.Event()
        #: Whether running jobs were abandoned.
        self.abandoned = False

    def stop(self) -> None:
        """Ask all tasks to finish their running jobs and end; then `run` returns. Thread-safe."""
        self._stopping.set()

    def abandon(self) -> None:
        """Cancel the tasks. Other workers run their jobs when the leases expire."""
        self.abandoned = True
        self._stopping.set()
        self._spark.sparkContext.cancelAllJobs()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            logger.warning("abandoning running jobs")
            self.abandon()
        else:
            logger.info("draining; a second signal abandons running jobs")
            self.stop()

    def run(self) -> int:
        """Work until `stop`, SIGTERM or SIGINT; a second signal abandons. Return how many tasks ended cleanly."""
        with _signals(self._on_signal), QueueServer(self._spec.url, self._spec.queue) as server:
            server.call("SET", self._spec.alive_key, "1", "EX", ALIVE_SECS)
            renewer = threading.Thread(target=self._keep_alive, args=(server,), name="tampu-spark-alive", daemon=True)
            renewer.start()
            try:
                return self._supervise()
            finally:
                self._stopping.set()
                renewer.join()

    def _keep_alive(self, server: QueueServer) -> None:
        while not self._stopping.wait(ALIVE_SECS / 3):
            try:
                server.call("SET", self._spec.alive_key, "1", "EX", ALIVE_SECS)
            except RedisError as error:
                # Without the key the tasks end; they are restarted when the server is back.
                logger.warning("could not renew the key that keeps the tasks alive: %s", error)
        with contextlib.suppress(RedisError):
            server.call("DEL", self._spec.alive_key)

    def _supervise(self) -> int:
        """Run Spark jobs one after the other until stopped: executors may die at any time."""
        context = self._spark.sparkContext
        spec, quick_failures, ended = self._spec, 0, 0
        while True:
            started = time.monotonic()
            try:
                tasks = context.parallelize(range(self.slots), self.slots)
                ended = sum(tasks.mapPartitionsWithIndex(lambda index, _: run_slot(spec, index)).collect())
            except Exception as error:
                if self._stopping.is_set():
                    return ended
                is_quick = time.monotonic() - started < QUICK_FAILURE_SECS
                quick_failures = quick_failures + 1 if is_quick else 0
                if quick_failures >= MAX_QUICK_FAILURES:
                    raise
                logger.warning("the Spark job of the workers failed; restarting it: %s", str(error)[:500])
            if self._stopping.wait(0.5):
                return ended


def cores_of(spark: SparkSession) -> int:
    """Return the cores of the executors; on a cluster, wait until the first ones have registered and no more come."""
    context = spark.sparkContext
    cores, deadline = context.defaultParallelism, time.monotonic() + REGISTERING_SECS
    if (context.master or "").startswith("local"):
        return cores
    status = context._jsc.sc().getExecutorMemoryStatus
    while time.monotonic() < deadline:
        known = cores if status().size() > 1 else None  # the driver is one of them
        time.sleep(1)
        cores = context.defaultParallelism
        if cores == known:
            break
    return cores


def run_on_spark(
    target: str,
    *,
    master: str | None = None,
    slots: int | None = None,
    settings: Mapping[str, Any] | None = None,
    log_file: Path | None = None,
) -> bool:
    """Run `tampu worker app:queue --on spark`: create a session and work until SIGTERM or SIGINT.

    Return whether all tasks ended cleanly.
    """
    # Executors may die any number of times; a speculative second copy of a task would never end.
    conf = {"spark.task.maxFailures": "1000", "spark.speculation": "false"}
    spark = spark_session("tampu-worker", master=master, conf=conf, log_file=log_file)
    try:
        worker = SparkWorker(spark, target, slots=slots, settings=settings)
        logger.info("worker started: %s in %d slots of %s", worker._spec.queue, worker.slots, spark.sparkContext.master)
        ended = worker.run()
        if not worker.abandoned:
            logger.info("drained")
        return not worker.abandoned and ended == worker.slots
    finally:
        with contextlib.suppress(Exception):  # Java may have ended already
            spark.stop()


def load_target(target: str, folder: str = "") -> list[Queue]:
    """Return the queue, or the list of queues, that `module:attribute` names."""
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = load_object(target)
    except (ConfigError, ImportError) as error:
        raise ConfigError(f"target {target!r} cannot be loaded on {socket.gethostname()}: {error}") from error
    queues = list(found) if isinstance(found, list | tuple | set) else [found]
    if not queues or not all(isinstance(queue, Queue) for queue in queues):
        raise ConfigError(f"target {target!r} must be a Queue or a list of them; got {shown(found)}")
    return queues


# --- on an executor


def run_slot(spec: SlotSpec, index: int) -> Iterator[int]:
    """Run one task: a worker that lives as long as the key of its group."""
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C reaches every process of a terminal; only the driver acts on it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_work(spec, f"{spec.alive_key.rpartition(':')[2]}-{socket.gethostname()}-{index}"))
    yield 1


async def _work(spec: SlotSpec, name: str) -> None:
    shutdown = asyncio.Event()
    watching = asyncio.create_task(_watch(spec, shutdown))
    try:
        if spec.handler is not None and spec.config is not None:
            from tampu.consume.consumer import Consumer

            consumer = Consumer(spec.url, replace(spec.config, consumer_id=name))
            await consumer.run(spec.handler, shutdown)
        else:
            from tampu.worker import Worker

            os.environ[URL_VARIABLE] = spec.default_url
            queues = load_target(spec.target or "", spec.folder)
            worker = Worker(queues, **{**spec.settings, "consumer_id": name})
            running = asyncio.create_task(worker.run())
            stopping = asyncio.create_task(shutdown.wait())
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await worker.close()
            await running
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(spec: SlotSpec, shutdown: asyncio.Event) -> None:
    """Set `shutdown` when the key is gone. An unreachable server says nothing about the driver."""
    client = Client(parse_url(spec.url), QueueKeys(spec.queue).tag.encode())
    try:
        while True:
            with contextlib.suppress(RedisError):
                if not await client.call("EXISTS", spec.alive_key):
                    break
            await asyncio.sleep(WATCH_SECS)
    finally:
        await client.close()
        shutdown.set()


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Stop cleanly on SIGTERM and SIGINT; only the main thread can set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
