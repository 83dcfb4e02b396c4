"""`tampu promoter` and `tampu scheduler`: run only this part, for several queues in one process.

Every worker runs both by default. Run them separately for queues whose workers have them disabled or are not always up.
"""

import asyncio
import logging
import math
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from tampu.base.event_loop import SIGNAL_SECS, ignore_signals
from tampu.cli.errors import ERROR, OK
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, LogFormat, LogLevel, Timeout, Url, complete_queue
from tampu.cli.output import set_up_logs
from tampu.cli.session import Session, run
from tampu.config import PromoterConfig, SchedulerConfig
from tampu.maintain.promoter import Promoter
from tampu.maintain.scheduler import Scheduler
from tampu.redis.settings import resolve_url

logger = logging.getLogger("tampu.cli.maintain")

Queues = Annotated[
    list[str], typer.Argument(metavar="QUEUE...", help="Queues to serve.", autocompletion=complete_queue)
]
LockTtl = Annotated[
    int, typer.Option("--lock-ttl", min=1, metavar="SECONDS", help="Time until a dead leader is replaced.")
]
MaxLength = Annotated[
    int,
    typer.Option(
        "--max-stream-len", min=1, help="While the stream is at least this long, due jobs wait in the delayed set."
    ),
]
Part = Callable[[asyncio.Event], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of both commands."""

    log: LogFormat = "text"
    log_level: LogLevel = "info"
    url: Url = None
    timeout: Timeout = DEFAULT_TIMEOUT_SECS

    def serve(self, role: str, queues: list[str], make: Callable[[str], Part]) -> None:
        """Run a part for each queue until a signal."""
        session = Session(self.url, self.timeout)
        parts = [make(queue) for queue in dict.fromkeys(queues)]
        set_up_logs(self.log, self.log_level, role)
        raise typer.Exit(run(_until_signal(role, queues, parts, session)))


def promoter(
    options: LoopOptions,
    queues: Queues,
    poll_interval_ms: Annotated[
        int,
        typer.Option(
            "--poll-interval-ms",
            min=1,
            help="Time between polls, in ms; ten times as long, up to 1 s, while only tampu adds delayed jobs.",
        ),
    ] = 100,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Maximum jobs moved per call.")] = 256,
    max_stream_len: MaxLength = 1_000_000,
    lock_ttl: LockTtl = 5,
    events: Annotated[bool, typer.Option("--events/--no-events", help="Write `waiting` events.")] = True,
) -> None:
    """Move delayed jobs into their queues when they are due."""

    def make(queue: str) -> Part:
        config = PromoterConfig(
            queue_name=queue,
            poll_interval_ms=poll_interval_ms,
            promote_batch=batch,
            max_stream_len=max_stream_len,
            lock_ttl_secs=lock_ttl,
            events_enabled=events,
        )
        return Promoter(resolve_url(options.url), config).run

    options.serve("promoter", queues, make)


def scheduler(
    options: LoopOptions,
    queues: Queues,
    tick_interval_ms: Annotated[
        int, typer.Option("--tick-interval-ms", min=1, help="Maximum time between polls, in milliseconds.")
    ] = 1000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Maximum schedules read per call.")] = 256,
    max_stream_len: MaxLength = 1_000_000,
    lock_ttl: LockTtl = 5,
) -> None:
    """Enqueue the job of each schedule when it is due."""

    def make(queue: str) -> Part:
        config = SchedulerConfig(
            queue_name=queue,
            tick_interval_ms=tick_interval_ms,
            batch=batch,
            max_stream_len=max_stream_len,
            lock_ttl_secs=lock_ttl,
        )
        return Scheduler(resolve_url(options.url), config).run

    options.serve("scheduler", queues, make)


async def _until_signal(role: str, queues: list[str], parts: list[Part], session: Session) -> int:
    """Run all parts until a signal. Another one, at least a second later, stops without waiting for them."""
    async with session:
        await session.client()  # fail at once if there is no server
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()
    tasks = [asyncio.ensure_future(part(shutdown)) for part in parts]
    together = asyncio.gather(*tasks)
    first_at = math.inf

    def stop() -> None:
        nonlocal first_at
        first_at = min(first_at, loop.time())
        if loop.time() > first_at + SIGNAL_SECS:
            logger.warning("second signal: stopping immediately")
            together.cancel()
        shutdown.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    logger.info("%s started: queues %s", role, ", ".join(queues))
    try:
        await together
    except asyncio.CancelledError:
        return ERROR
    finally:
        for task in tasks:
            task.cancel()
        ignore_signals(loop, (signal.SIGINT, signal.SIGTERM))
    logger.info("stopped")
    return OK
