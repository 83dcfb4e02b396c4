"""`tampu promoter` and `tampu scheduler`: these parts by themselves, for several queues in one process.

Every worker has both; alone they serve queues whose workers have not, or are away at times.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from tampu.cli.errors import ERROR, OK
from tampu.cli.logs import set_up_logs
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, LogFormat, LogLevel, Timeout, Url, complete_queue
from tampu.cli.session import Session, run
from tampu.config import PromoterConfig, SchedulerConfig
from tampu.maintain.promoter import Promoter
from tampu.maintain.scheduler import Scheduler
from tampu.redis.settings import resolve_url

logger = logging.getLogger("tampu.cli.maintain")

Queues = Annotated[
    list[str], typer.Argument(metavar="QUEUE...", help="The queues to serve.", autocompletion=complete_queue)
]
LockTtl = Annotated[
    int, typer.Option("--lock-ttl", min=1, metavar="SECONDS", help="A dead leader is replaced after this.")
]
MaxLength = Annotated[
    int, typer.Option("--max-stream-len", min=1, help="At this length of the stream jobs wait outside.")
]
Part = Callable[[asyncio.Event], Awaitable[None]]


def promoter(
    queues: Queues,
    poll_interval_ms: Annotated[
        int, typer.Option("--poll-interval-ms", min=1, help="Longest wait between looks.")
    ] = 100,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Most jobs moved at once.")] = 256,
    max_stream_len: MaxLength = 1_000_000,
    lock_ttl: LockTtl = 5,
    events: Annotated[bool, typer.Option("--events/--no-events", help="Write `waiting` events.")] = True,
    log: LogFormat = "text",
    log_level: LogLevel = "info",
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Move delayed jobs into their queues when their time has come."""

    def make(queue: str) -> Part:
        config = PromoterConfig(
            queue_name=queue,
            poll_interval_ms=poll_interval_ms,
            promote_batch=batch,
            max_stream_len=max_stream_len,
            lock_ttl_secs=lock_ttl,
            events_enabled=events,
        )
        return Promoter(resolve_url(url), config).run

    _serve("promoter", queues, make, Session(url, timeout), log, log_level)


def scheduler(
    queues: Queues,
    tick_interval_ms: Annotated[
        int, typer.Option("--tick-interval-ms", min=1, help="Longest wait between looks.")
    ] = 1000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Most repeatables read at once.")] = 256,
    max_stream_len: MaxLength = 1_000_000,
    lock_ttl: LockTtl = 5,
    log: LogFormat = "text",
    log_level: LogLevel = "info",
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Fire repeatable jobs when they are due."""

    def make(queue: str) -> Part:
        config = SchedulerConfig(
            queue_name=queue,
            tick_interval_ms=tick_interval_ms,
            batch=batch,
            max_stream_len=max_stream_len,
            lock_ttl_secs=lock_ttl,
        )
        return Scheduler(resolve_url(url), config).run

    _serve("scheduler", queues, make, Session(url, timeout), log, log_level)


def _serve(
    role: str, queues: list[str], make: Callable[[str], Part], session: Session, log: str, log_level: str
) -> None:
    parts = [make(queue) for queue in dict.fromkeys(queues)]
    set_up_logs(log, log_level, role)
    raise typer.Exit(run(_until_signal(role, queues, parts, session)))


async def _until_signal(role: str, queues: list[str], parts: list[Part], session: Session) -> int:
    """Run all parts until a signal; a second one does not wait for them."""
    async with session:
        await session.client()  # raises at once when there is no server
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()
    tasks = [asyncio.ensure_future(part(shutdown)) for part in parts]
    together = asyncio.gather(*tasks)

    def stop() -> None:
        if shutdown.is_set():
            logger.warning("not waited for")
            together.cancel()
        shutdown.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    logger.info("%s of %s", role, ", ".join(queues))
    try:
        await together
    except asyncio.CancelledError:
        return ERROR
    finally:
        for task in tasks:
            task.cancel()
    logger.info("stopped")
    return OK
