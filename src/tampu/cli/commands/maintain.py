"""`tampu promoter` and `tampu scheduler`: run only this part, for several queues in one process.

Every worker runs both by default. Run them separately for queues whose workers have them disabled or are not always up.
"""

import asyncio
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer import Argument, Option

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

Queues = Annotated[list[str], Argument(metavar="QUEUE...", help="Queues to serve.", autocompletion=complete_queue)]
LockTtl = Annotated[int, Option(min=1, metavar="SECONDS", help="Time until a dead leader is replaced.")]
MaxLength = Annotated[
    int, Option(min=1, help="While the stream is at least this long, due jobs wait in the delayed set.")
]


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of both commands."""

    log: LogFormat = "text"
    log_level: LogLevel = "info"
    url: Url = None
    timeout: Timeout = DEFAULT_TIMEOUT_SECS

    def serve(
        self,
        role: str,
        queues: list[str],
        make: Callable[..., Promoter | Scheduler],
        config: Callable[..., Any],
        **settings: Any,
    ) -> None:
        """Run `make(url, config)` for each queue until a signal."""
        session, url = Session(self.url, self.timeout), resolve_url(self.url)
        parts = [make(url, config(queue_name=queue, **settings)) for queue in dict.fromkeys(queues)]
        set_up_logs(self.log, self.log_level, role)
        raise typer.Exit(run(_until_signal(role, queues, parts, session)))


def promoter(
    options: LoopOptions,
    queues: Queues,
    poll_interval_ms: Annotated[
        int,
        Option(
            min=1, help="Time between polls, in ms; ten times as long, up to 1 s, while only tampu adds delayed jobs."
        ),
    ] = 100,
    batch: Annotated[int, Option(min=1, help="Maximum jobs moved per call.")] = 256,
    max_stream_len: MaxLength = 1_000_000,
    lock_ttl: LockTtl = 5,
    events: Annotated[bool, Option(help="Write `waiting` events.")] = True,
) -> None:
    """Move delayed jobs into their queues when they are due."""

    options.serve(
        *("promoter", queues, Promoter, PromoterConfig),
        poll_interval_ms=poll_interval_ms,
        promote_batch=batch,
        max_stream_len=max_stream_len,
        lock_ttl_secs=lock_ttl,
        events_enabled=events,
    )


def scheduler(
    options: LoopOptions,
    queues: Queues,
    tick_interval_ms: Annotated[int, Option(min=1, help="Maximum time between polls, in ms.")] = 1000,
    batch: Annotated[int, Option(min=1, help="Maximum schedules read per call.")] = 256,
    max_stream_len: MaxLength = 1_000_000,
    lock_ttl: LockTtl = 5,
) -> None:
    """Enqueue the job of each schedule when it is due."""

    options.serve(
        *("scheduler", queues, Scheduler, SchedulerConfig),
        tick_interval_ms=tick_interval_ms,
        batch=batch,
        max_stream_len=max_stream_len,
        lock_ttl_secs=lock_ttl,
    )


async def _until_signal(role: str, queues: list[str], parts: list[Promoter | Scheduler], session: Session) -> int:
    """Run all parts until a signal. Another one, at least a second later, stops without waiting for them."""
    async with session:
        await session.client()  # fail at once if there is no server
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()
    tasks = [asyncio.ensure_future(part.run(shutdown)) for part in parts]
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
