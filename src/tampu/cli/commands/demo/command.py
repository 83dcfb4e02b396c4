"""`tampu demo`: starts a server, opens the shop, shows the day, sums it up."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from tampu.cli.commands.demo.day import REPORTS, DayClock, live_a_day
from tampu.cli.commands.demo.shop import Shop
from tampu.cli.commands.demo.tally import Tally
from tampu.cli.commands.demo.view import DayView, Story, summary
from tampu.cli.commands.pipeline import Stopped, build_lake
from tampu.cli.errors import INTERRUPTED
from tampu.cli.output import is_terminal, show, stdout_console, write_line
from tampu.cli.session import parse_info, product_version, run
from tampu.embedded.server import EmbeddedServer
from tampu.errors import ConfigError
from tampu.spark.session import SHORT_LIVED, require_lake, require_spark
from tampu.worker import Worker

#: Pictures a second, and looks into the queues.
PICTURES_PER_SEC = 12
LOOK_SECS = 0.2
#: The worker's settings: short waits, so that the day ends in time.
CONCURRENCY = 50
HOW_TO_GET_IT = "With Spark the demo ends with a report of the day: pip install 'tampu[spark]', and Java 17 or later."


def demo(
    hour: Annotated[
        float, typer.Option("--hour", min=0.05, max=60, metavar="SECONDS", help="How long an hour of the day takes.")
    ] = 1.0,
    spark: Annotated[
        bool | None,
        typer.Option(
            "--spark/--no-spark", help="End with tables and a report by Spark.", show_default="if it is installed"
        ),
    ] = None,
) -> None:
    """Watch a small shop's day: orders, flaky payments, retries, delayed jobs, dead letters, a replay."""
    with contextlib.ExitStack() as stack:
        folder = _folder(stack)
        server = stack.enter_context(EmbeddedServer(folder))
        names = run(_demo(server, hour))
        _write_history(folder, f"embedded://{server.data_dir}", names, wanted=spark)


def _folder(stack: contextlib.ExitStack) -> Path:
    """Where the data are kept, to be looked at afterwards: in the user's cache, or elsewhere when that is in use."""
    folder = Path(os.environ.get("TAMPU_CACHE") or Path.home() / ".cache" / "tampu") / "demo"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = stack.enter_context((folder / "demo.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another demo would empty this one's queues
        if not (folder / "server.json").exists():  # somebody is looking at the last demo
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="tampu-demo-"))


async def _demo(server: EmbeddedServer, hour_secs: float) -> list[str]:
    """The day; the names of its queues."""
    started = time.monotonic()
    url = f"embedded://{server.data_dir}"
    is_live = is_terminal()
    shop = Shop(url, hour_secs)
    try:
        client = shop.orders.producer.ready_client()
        await client.call("FLUSHALL")  # the last demo's
        version = product_version(parse_info(await client.call("INFO", "server")))
        story, tally, clock = Story(is_live=is_live), Tally(shop.queues), DayClock(hour_secs)
        if not is_live:
            write_line(f"tampu demo: a shop's day on an embedded {version}")
        async with _working(shop), _following(tally):
            with contextlib.ExitStack() as stack:
                if is_live:
                    view = DayView(clock, tally, story, f"an embedded {version}")
                    live = Live(view, console=stdout_console(), refresh_per_second=PICTURES_PER_SEC, transient=True)
                    stack.enter_context(live)
                replayed = await live_a_day(shop, clock, tally, story)
            await tally.look()
        added = shop.added | {"sales_report": REPORTS}
        secs = time.monotonic() - started
        show(summary(added, tally, replayed=replayed, secs=secs, url=url, is_live=is_live))
        return [queue.name for queue in shop.queues]
    finally:
        await shop.close()


@contextlib.asynccontextmanager
async def _working(shop: Shop) -> AsyncIterator[None]:
    """A worker at work."""
    worker = Worker(shop.queues, concurrency=CONCURRENCY, delayed_poll_interval_ms=20, shutdown_deadline_secs=5)
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.close()
        await running


@contextlib.asynccontextmanager
async def _following(tally: Tally) -> AsyncIterator[None]:
    """The tally at work."""

    async def look_again_and_again() -> None:
        while True:
            await tally.look()
            await asyncio.sleep(LOOK_SECS)

    tasks = [asyncio.create_task(tally.follow()), asyncio.create_task(look_again_and_again())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write_history(folder: Path, url: str, queues: Sequence[str], *, wanted: bool | None) -> None:
    """Run the pipeline over the demo's events and write its report into the demo's folder.

    `wanted=None`: if it can be had; otherwise one line tells how to get it.
    """
    if wanted is False:
        return
    try:
        require_spark()
        require_lake()
    except ConfigError:
        if wanted:
            raise
        write_line("")
        write_line(HOW_TO_GET_IT)
        return
    from tampu.spark.lake.report import write_report

    lake = folder / "lake"
    shutil.rmtree(lake, ignore_errors=True)  # the last demo's: its events are gone, and these are others
    write_line("")
    write_line("The day's history as tables, by Spark (under a minute, most of it Spark's start; --no-spark skips it):")
    try:
        build_lake(url, list(queues), lake, conf=SHORT_LIVED)
    except Stopped as stop:
        if stop.exit_code == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise typer.Exit(stop.exit_code) from None
    report = write_report(lake, folder / "report.html")
    write_line(f"Look at the day: {report.absolute().as_uri()}")
