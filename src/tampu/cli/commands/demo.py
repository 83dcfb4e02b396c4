"""`tampu demo`: one day of a small shop on an embedded server, shown live, and a summary.

`demo_shop.py` has the tasks, written as in any application, and what happens when; `demo_view.py` counts and shows.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from typer import Option

from tampu.cli.commands.demo_shop import REPORTS, DayClock, Shop, live_a_day
from tampu.cli.commands.demo_view import DayView, Story, Tally, summary
from tampu.cli.commands.pipeline import Stopped, build_lake
from tampu.cli.errors import INTERRUPTED
from tampu.cli.output import console_of, is_terminal, show, write_line
from tampu.cli.session import parse_info, product_version, run
from tampu.embedded.server import EmbeddedServer
from tampu.errors import ConfigError
from tampu.spark.session import SHORT_LIVED, require_lake, require_spark
from tampu.worker import Worker

#: Frames per second, and seconds between snapshots of the queues.
PICTURES_PER_SEC = 12
SNAPSHOT_SECS = 0.2
CONCURRENCY = 50
HOW_TO_GET_IT = "For a Spark report of the day, install Java 17 or newer and run: pip install 'tampu[spark]'"


def demo(
    hour: Annotated[float, Option(min=0.05, max=60, metavar="SECONDS", help="Duration of one simulated hour.")] = 1.0,
    spark: Annotated[
        bool | None,
        Option("--spark/--no-spark", help="Build Spark tables and a report at the end.", show_default="if installed"),
    ] = None,
    dashboard: Annotated[
        bool, Option("--dashboard", help="Show the day in the dashboard, too, and keep it open.")
    ] = False,
) -> None:
    """Simulate a day in a small shop: orders, flaky payments, retries, delayed jobs, dead letters and a replay."""
    logging.getLogger("tampu.job").setLevel(logging.CRITICAL)  # the payments that fail are part of the story
    with contextlib.ExitStack() as stack:
        folder = _folder(stack)
        server = stack.enter_context(EmbeddedServer(folder))
        url = f"embedded://{server.data_dir}"
        shown = stack.enter_context(_serving(url)) if dashboard else None
        names = run(_demo(server, hour))
        _write_history(folder, url, names, build=spark)
        if shown is not None:
            write_line("Ctrl-C closes the dashboard.")
            with contextlib.suppress(KeyboardInterrupt):
                shown.wait()


@contextlib.contextmanager
def _serving(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the dashboard in a dedicated process, which does not wait for the demo's event loop."""
    command = [sys.executable, "-P", "-m", "tampu.cli", "dashboard", "--port", "0", "--allow-actions", "--url", url]
    with subprocess.Popen(command) as serving:  # noqa: S603 - this program
        yield serving
        serving.terminate()


def _folder(stack: contextlib.ExitStack) -> Path:
    """Return the folder for the demo's data: in the user's cache, or a temporary one if that is in use."""
    folder = Path(os.environ.get("TAMPU_CACHE") or Path.home() / ".cache" / "tampu") / "demo"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = stack.enter_context((folder / "demo.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a second demo would flush the queues of this one
        if not (folder / "server.json").exists():  # otherwise the last demo's server is still in use
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="tampu-demo-"))


async def _demo(server: EmbeddedServer, hour_secs: float) -> list[str]:
    """Run the day and return the names of its queues."""
    started = time.monotonic()
    url = f"embedded://{server.data_dir}"
    is_live = is_terminal()
    shop = Shop(url, hour_secs)
    try:
        client = shop.orders.producer.ready_client()
        await client.call("FLUSHALL")  # data of the previous demo
        version = product_version(parse_info(await client.call("INFO", "server")))
        story, tally, clock = Story(is_live=is_live), Tally(shop.queues), DayClock(hour_secs)
        if not is_live:
            write_line(f"tampu demo: one day of a shop on an embedded {version}")
        worker = Worker(shop.queues, concurrency=CONCURRENCY, delayed_poll_interval_ms=20, shutdown_deadline_secs=5)
        async with worker, _following(tally):
            with contextlib.ExitStack() as stack:
                if is_live:
                    view = DayView(clock, tally, story, f"an embedded {version}")
                    live = Live(
                        view, console=console_of(sys.stdout), refresh_per_second=PICTURES_PER_SEC, transient=True
                    )
                    stack.enter_context(live)
                replayed = await live_a_day(shop, clock, tally, story)
            await tally.take_snapshots()
        added = shop.added | {"sales_report": REPORTS}
        secs = time.monotonic() - started
        show(summary(added, tally, replayed=replayed, secs=secs, url=url, is_live=is_live))
        return [queue.name for queue in shop.queues]
    finally:
        await shop.close()


@contextlib.asynccontextmanager
async def _following(tally: Tally) -> AsyncIterator[None]:
    """Run the tally."""

    async def keep_snapshots() -> None:
        while True:
            await tally.take_snapshots()
            await asyncio.sleep(SNAPSHOT_SECS)

    tasks = [asyncio.create_task(tally.follow()), asyncio.create_task(keep_snapshots())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write_history(folder: Path, url: str, queues: Sequence[str], *, build: bool | None) -> None:
    """Run the pipeline over the demo's events and write its report into the demo's folder.

    With `build=None`, do so only if Spark is installed; otherwise print how to install it.
    """
    if build is False:
        return
    try:
        require_spark()
        require_lake()
    except ConfigError:
        if build:
            raise
        write_line("")
        write_line(HOW_TO_GET_IT)
        return
    from tampu.spark.lake.report import write_report

    lake = folder / "lake"
    shutil.rmtree(lake, ignore_errors=True)  # from the previous demo, whose events are gone
    write_line("")
    write_line("Building Spark tables and a report from the day's events (up to a minute; skip with --no-spark):")
    try:
        build_lake(url, list(queues), lake, conf=SHORT_LIVED)
    except Stopped as stop:
        if stop.exit_code == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise typer.Exit(stop.exit_code) from None
    report = write_report(lake, folder / "report.html")
    write_line(f"Report: {report.absolute().as_uri()}")
