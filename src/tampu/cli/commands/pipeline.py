"""`tampu pipeline run` and `tampu pipeline report`: the lake of a queue's history, and the page people look at."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tampu.cli.errors import INTERRUPTED, OK, TERMINATED, CliError, UsageError
from tampu.cli.logs import silence_py4j
from tampu.cli.options import (
    Url,
    complete_queue,
)
from tampu.cli.output import printable, say, stderr_console, write_line
from tampu.cli.units import parse_duration, plural
from tampu.errors import Error
from tampu.redis.settings import resolve_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tampu.spark.lake.pipeline import Summary

app = typer.Typer(
    name="pipeline",
    help="Build a lake of Parquet tables from queues' events with Spark, and a report from it.",
    no_args_is_help=True,
)

#: What Java and Spark say goes here, in the lake: dozens of lines, of which people need none as long as all is well.
LOG_NAME = "_spark.log"
#: How long the server may take to answer before Spark is started, in seconds.
SERVER_PATIENCE_SECS = 5.0

Lake = Annotated[Path, typer.Option("--lake", metavar="DIR", help="The folder of the lake.", file_okay=False)]


class Stopped(BaseException):
    """A signal asked the pipeline to end. No Exception: the bridge to Java takes those for a broken connection, and
    asks again.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped")
        self.exit_code = exit_code


@app.command()
def run(
    queue: Annotated[
        list[str],
        typer.Option(
            "--queue", "-q", metavar="QUEUE", help="A queue; may be given again.", autocompletion=complete_queue
        ),
    ],
    lake: Lake,
    url: Url = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="DURATION", help="Run again and again, this far apart: 10s, 5m.", show_default="once"
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            "--master", metavar="URL", envvar="TAMPU_SPARK_MASTER", help="The Spark master.", show_default="local[*,4]"
        ),
    ] = None,
    max_per_batch: Annotated[
        int, typer.Option("--max-per-batch", min=1, help="Most entries landed in one micro-batch.")
    ] = 1_000_000,
) -> None:
    """Land new events and dead letters, and bring the tables up to date.

    Ended at any point, even by kill -9, the next run goes on from there. With --every a signal is the way to end it.
    """
    pause = None if every is None else parse_duration(every)
    if pause is not None and pause <= 0:
        raise UsageError(f"--every must be longer than nothing; got {every!r}")
    try:
        build_lake(url, queue, lake, pause=pause, master=master, max_per_batch=max_per_batch)
    except Stopped as stop:
        say("stopped; the next run goes on from here")
        raise typer.Exit(OK if pause is not None else stop.exit_code) from None


def build_lake(
    url: str | None,
    queues: list[str],
    lake: Path,
    *,
    pause: float | None = None,
    master: str | None = None,
    max_per_batch: int = 1_000_000,
    conf: Mapping[str, str] | None = None,
) -> None:
    """Run the pipeline, once or with a pause for ever; a signal raises `Stopped`.

    Whatever can be wrong is said before Spark is started.
    """
    from tampu.spark.lake.manifest import lake_folder, sole_writer
    from tampu.spark.session import require_spark, spark_session

    require_spark()
    from tampu.spark.lake.pipeline import Pipeline

    lake = lake_folder(lake)
    checked_url = _checked(url, queues)
    with sole_writer(lake):
        pass  # a second pipeline on one lake is told now, and not after Spark's start
    silence_py4j()
    log_file = lake / LOG_NAME
    with _ended_by_signals() as catch_signals, _steps() as on_step:
        on_step("starting Spark")
        spark = spark_session("tampu-pipeline", master=master, conf=conf, log_file=log_file)
        catch_signals()  # again: PySpark has put a handler of its own for Ctrl-C in place of ours
        try:
            pipeline = Pipeline(spark, checked_url, queues, lake, max_per_batch=max_per_batch, on_step=on_step)
            _rounds(pipeline.run, pause, lambda: _is_alive(spark), log_file)
        finally:
            with contextlib.suppress(Exception):  # Java may be gone already
                spark.stop()


def _rounds(work: Callable[[], Summary], pause: float | None, is_alive: Callable[[], bool], log_file: Path) -> None:
    while True:
        started = time.monotonic()
        try:
            _show(work(), time.monotonic() - started)
        except Exception as error:
            told = f"{_cause_of(error)} (all that was said: {log_file})"
            # A server that is away for a while must not end a pipeline that is to run for months; without Java it is
            # at its end, and whoever started it can start it again.
            if pause is None or not is_alive():
                raise CliError(f"the pipeline failed, and goes on from here when run again: {told}") from error
            say(f"this round failed, and the next goes on from here: {told}")
        if pause is None:
            return
        time.sleep(max(pause - (time.monotonic() - started), 0))


def _checked(url: str | None, queues: list[str]) -> str:
    """The URL, of a server that answers; queues it does not know are pointed out."""
    from tampu.spark.options import ReadOptions
    from tampu.spark.server import QueueServer

    if any("," in queue for queue in queues):
        raise UsageError("--queue takes one queue; give it again for others")
    options = ReadOptions.parse({"url": resolve_url(url), "queue": ",".join(queues)})
    for queue in options.queues:
        with QueueServer(options.url, queue) as server:
            keys = server.keys
            if not server.call("EXISTS", keys.events, keys.dlq, keys.stream, patience_secs=SERVER_PATIENCE_SECS):
                say(f"warning: there is no queue {queue!r} yet")
    return options.url


def _is_alive(spark: Any) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:  # its Java has ended
        return False


def _cause_of(error: Exception) -> str:
    """The one line of an error that tells what happened: Spark wraps it in stack traces of two languages."""
    if isinstance(error, Error | OSError):
        return str(error)
    text = str(error)
    # The last line of a Python traceback: the error that started it all.
    found = re.findall(r"^\s*((?:tampu\.|(?=[\w.]+(?:Error|Exception):))[\w.]+): (.+)$", text, re.MULTILINE)
    if found:
        name, line = found[-1]
        return f"{name.rpartition('.')[2]}: {line.strip()}"[:500]
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Shows what is under way: in one line with a spinner on a terminal, line by line elsewhere."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda step: say(f"{step} ...")
        return
    with console.status("") as status:
        yield lambda step: status.update(f"{printable(step)} ...")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """SIGTERM and Ctrl-C end the work at once, wherever it is: nothing is half done that the next run cannot finish."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        raise Stopped(INTERRUPTED if number == signal.SIGINT else TERMINATED)

    def catch() -> None:
        for number in numbers:
            signal.signal(number, stop)

    former = {number: signal.getsignal(number) for number in numbers}
    catch()
    try:
        yield catch
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _show(summary: Summary, took: float) -> None:
    landed = ", ".join(f"{count:,} {stream}" for stream, count in summary.landed.items())
    write_line(
        f"landed {landed}; computed {plural(summary.silver_partitions, 'partition')} of silver and "
        f"{summary.gold_partitions:,} of gold in {took:.1f} s"
    )
    if count := summary.trimmed.get("events"):
        say(f"warning: {count:,} events in all were trimmed before they could be landed")
    if count := summary.trimmed.get("dlq"):  # most often on purpose: a replay takes the letter away
        say(f"{plural(count, 'dead letter')} in all had been replayed, removed or trimmed before being landed")


@app.command()
def report(
    lake: Lake,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.", dir_okay=False)
    ] = Path("report.html"),
) -> None:
    """Write one HTML page with plots from the lake. It needs neither Spark nor Java nor a server."""
    from tampu.spark.session import require_spark

    require_spark(java=False)
    from tampu.spark.lake.report import write_report

    write_line(f"wrote {write_report(lake, output)}")
