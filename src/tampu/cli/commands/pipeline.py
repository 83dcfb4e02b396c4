"""`tampu pipeline run|report`: builds the lake of a queue's history, and an HTML report from it."""

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
    help="Build Parquet tables from the events of queues with Spark, and a report from the tables.",
    no_args_is_help=True,
)

#: Log file in the lake for the output of Java and Spark: dozens of lines that only matter when something fails.
LOG_NAME = "_spark.log"
#: How long to wait for the server before Spark is started, in seconds.
SERVER_PATIENCE_SECS = 5.0

Lake = Annotated[Path, typer.Option("--lake", metavar="DIR", help="Folder of the lake.", file_okay=False)]


class Stopped(BaseException):
    """A signal asked the pipeline to stop.

    Not an Exception: py4j, the bridge to Java, treats those as a broken connection and retries.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped")
        self.exit_code = exit_code


@app.command()
def run(
    queue: Annotated[
        list[str],
        typer.Option(
            "--queue",
            "-q",
            metavar="QUEUE",
            help="Queue name. Can be given more than once.",
            autocompletion=complete_queue,
        ),
    ],
    lake: Lake,
    url: Url = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="DURATION", help="Keep running, at this interval (10s, 5m).", show_default="once"
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            "--master", metavar="URL", envvar="TAMPU_SPARK_MASTER", help="Spark master.", show_default="local[*,4]"
        ),
    ] = None,
    max_per_batch: Annotated[
        int, typer.Option("--max-per-batch", min=1, help="Maximum entries per micro-batch.")
    ] = 1_000_000,
) -> None:
    """Land new events and dead letters in the lake and update its tables.

    If a run is interrupted at any point, even by kill -9, the next run continues from there.

    With --every, stop it with Ctrl-C or SIGTERM.
    """
    pause = None if every is None else parse_duration(every)
    if pause is not None and pause <= 0:
        raise UsageError(f"--every must be longer than 0 s; got {every!r}")
    try:
        build_lake(url, queue, lake, pause=pause, master=master, max_per_batch=max_per_batch)
    except Stopped as stop:
        say("stopped; the next run continues from here")
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
    """Run the pipeline once, or forever with a pause in between; a signal raises `Stopped`.

    Arguments and the server are checked before Spark is started.
    """
    from tampu.spark.lake.manifest import lake_folder, sole_writer
    from tampu.spark.session import require_spark, spark_session

    require_spark()
    from tampu.spark.lake.pipeline import Pipeline

    lake = lake_folder(lake)
    checked_url = _checked(url, queues)
    with sole_writer(lake):
        pass  # report a second pipeline on this lake now and not after Spark has started
    silence_py4j()
    log_file = lake / LOG_NAME
    with _ended_by_signals() as catch_signals, _steps() as on_step:
        on_step("starting Spark")
        spark = spark_session("tampu-pipeline", master=master, conf=conf, log_file=log_file)
        catch_signals()  # again: PySpark has replaced our handler for Ctrl-C with its own
        try:
            pipeline = Pipeline(spark, checked_url, queues, lake, max_per_batch=max_per_batch, on_step=on_step)
            _rounds(pipeline.run, pause, lambda: _is_alive(spark), log_file)
        finally:
            with contextlib.suppress(Exception):  # Java may have exited already
                spark.stop()


def _rounds(work: Callable[[], Summary], pause: float | None, is_alive: Callable[[], bool], log_file: Path) -> None:
    while True:
        started = time.monotonic()
        try:
            _show(work(), time.monotonic() - started)
        except Exception as error:
            told = f"{_cause_of(error)} (full log: {log_file})"
            # With --every, a temporary outage must not end the pipeline. If Java has exited it cannot continue, and
            # must be restarted from outside.
            if pause is None or not is_alive():
                raise CliError(f"the pipeline failed; run it again to continue from here: {told}") from error
            say(f"this run failed; the next one continues from here: {told}")
        if pause is None:
            return
        time.sleep(max(pause - (time.monotonic() - started), 0))


def _checked(url: str | None, queues: list[str]) -> str:
    """Return the URL after checking that the server answers; warn about queues that do not exist."""
    from tampu.spark.options import ReadOptions
    from tampu.spark.server import QueueServer

    if any("," in queue for queue in queues):
        raise UsageError("--queue takes one name; repeat the option for more queues")
    options = ReadOptions.parse({"url": resolve_url(url), "queue": ",".join(queues)})
    for queue in options.queues:
        with QueueServer(options.url, queue) as server:
            keys = server.keys
            if not server.call("EXISTS", keys.events, keys.dlq, keys.stream, patience_secs=SERVER_PATIENCE_SECS):
                say(f"warning: no queue {queue!r} yet")
    return options.url


def _is_alive(spark: Any) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:  # its JVM has exited
        return False


def _cause_of(error: Exception) -> str:
    """Return the line of an error that says what happened, without the stack traces that Spark adds around it."""
    if isinstance(error, Error | OSError):
        return str(error)
    text = str(error)
    # The last line of the Python traceback is the original error.
    found = re.findall(r"^\s*((?:tampu\.|(?=[\w.]+(?:Error|Exception):))[\w.]+): (.+)$", text, re.MULTILINE)
    if found:
        name, line = found[-1]
        return f"{name.rpartition('.')[2]}: {line.strip()}"[:500]
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Show the current step: with a spinner on a terminal, otherwise one line per step."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda step: say(f"{step} ...")
        return
    with console.status("") as status:
        yield lambda step: status.update(f"{printable(step)} ...")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Stop at once on SIGTERM and Ctrl-C: the next run can finish whatever was interrupted."""
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
        f"landed {landed}; updated {plural(summary.silver_partitions, 'silver partition')} and "
        f"{plural(summary.gold_partitions, 'gold partition')} in {took:.1f} s"
    )
    if count := summary.trimmed.get("events"):
        say(f"warning: {count:,} events in total were trimmed before they were landed")
    if count := summary.trimmed.get("dlq"):  # mostly expected: a replay removes the dead letter
        say(f"{plural(count, 'dead letter')} in total were replayed, removed or trimmed before they were landed")


@app.command()
def report(
    lake: Lake,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.", dir_okay=False)] = Path(
        "report.html"
    ),
) -> None:
    """Write an HTML page with charts from the lake. Needs neither Spark, Java nor a server."""
    from tampu.spark.session import require_spark

    require_spark(java=False)
    from tampu.spark.lake.report import write_report

    write_line(f"wrote {write_report(lake, output)}")
