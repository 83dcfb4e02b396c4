"""`tampu pipeline`: build a lake of Delta tables from the events of queues, query it, keep it small, report on it."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import sys
import time
from dataclasses import asdict
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from tampu.base.checks import one_line, without_colors
from tampu.base.units import plural, size
from tampu.cli.errors import ERROR, INTERRUPTED, OK, TERMINATED, CliError, UsageError
from tampu.cli.options import AsJson, Url, duration_option, queue_option
from tampu.cli.output import cell, console_of, printable, say, show, silence_py4j, write_json, write_line
from tampu.cli.tables import FittingTable, table
from tampu.cli.units import parse_duration
from tampu.errors import Error
from tampu.redis.settings import resolve_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tampu.spark.lake.pipeline import Summary

app = typer.Typer(
    name="pipeline",
    help="Build a lake of Delta tables from queue events with Spark; query it and report on it.",
    no_args_is_help=True,
)

#: How long to wait for the server's answer before Spark is started, in seconds.
SERVER_PATIENCE_SECS = 5.0

Lake = Annotated[Path, Option("--lake", metavar="DIR", help="The folder of the lake.", file_okay=False)]
Queues = Annotated[list[str], queue_option(help="Queue to read. Can be given more than once.")]
Master = Annotated[
    str | None,
    Option("--master", metavar="URL", envvar="TAMPU_SPARK_MASTER", help="The Spark master.", show_default="local[*,4]"),
]
Keep = Annotated[
    str, Option(metavar="DURATION", help="Keep replaced files this long (2h, 1d), for readers that have opened them.")
]


class Stopped(BaseException):
    """A signal asked the pipeline to end.

    Not an Exception: the bridge to Java takes those for a broken connection and retries.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped")
        self.exit_code = exit_code


@app.command()
def run(
    queue: Queues,
    lake: Lake,
    url: Url = None,
    every: Annotated[
        float | None, duration_option(help="Repeat at this interval (10s, 5m).", show_default="once")
    ] = None,
    master: Master = None,
    max_per_batch: Annotated[int, Option(min=1, help="Maximum number of entries per batch.")] = 1_000_000,
    keep: Keep = "2h",
    contracts: Annotated[
        str | None,
        Option(metavar="FILE", help="Also check payloads against these rules; exit with 1 if one breaks them."),
    ] = None,
) -> None:
    """Land new events and dead letters, and bring the tables up to date.

    If a run is killed, even by kill -9, the next one continues from there. With --every, the command repeats until it
    receives a signal. Small files are merged after each run; every 10 runs, replaced files are deleted.
    """
    if every is not None and every <= 0:
        raise UsageError("--every must be longer than 0")
    keep_hours = _hours(keep)
    try:
        broken = build_lake(
            url, queue, lake, pause=every, master=master, max_per_batch=max_per_batch, keep_hours=keep_hours,
            contracts=contracts,
        )  # fmt: skip
    except Stopped as stop:
        say("stopped; the next run continues from here")
        raise typer.Exit(OK if every is not None else stop.exit_code) from None
    if broken:
        raise typer.Exit(ERROR)


def build_lake(
    url: str | None,
    queues: list[str],
    lake: Path,
    *,
    pause: float | None = None,
    master: str | None = None,
    max_per_batch: int = 1_000_000,
    keep_hours: int = 2,
    contracts: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> bool:
    """Run the pipeline once, or repeatedly with a pause in between; a signal raises `Stopped`.

    Everything that can be checked is checked before Spark is started. Returns whether a payload breaks its contract.
    """
    _require(spark=True)
    from tampu.spark.lake.contracts import Contracts
    from tampu.spark.lake.folder import LOG_NAME, LakeVersion, sole_writer, writable_lake

    rules = None if contracts is None else Contracts.load(contracts)
    lake = writable_lake(lake)
    checked_url = _checked(url, queues)
    with sole_writer(lake):  # a second pipeline on one lake, and a lake of a newer version, are refused here
        LakeVersion.load(lake)
    log_file = lake / LOG_NAME
    with _session(master, conf, log_file, is_repeated=pause is not None) as (spark, on_step):
        from tampu.spark.lake.pipeline import Pipeline

        pipeline = Pipeline(
            spark, checked_url, queues, lake, max_per_batch=max_per_batch, keep_hours=keep_hours, rules=rules,
            on_step=on_step,
        )  # fmt: skip
        try:
            return _rounds(pipeline.run, pause, lambda: _is_alive(spark), log_file)
        finally:
            pipeline.close()


@contextlib.contextmanager
def _session(
    master: str | None, conf: Mapping[str, str] | None, log_file: Path, *, is_repeated: bool = False
) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """Start Spark; signals raise `Stopped` within the block."""
    from tampu.spark.session import spark_session

    silence_py4j()
    with _ended_by_signals() as catch_signals, _steps(is_repeated=is_repeated) as on_step:
        on_step("starting Spark")
        spark = spark_session("tampu-pipeline", master=master, conf=conf, log_file=log_file)
        catch_signals()  # again: PySpark has replaced the handler of Ctrl-C
        try:
            yield spark, on_step
        finally:
            with contextlib.suppress(Exception):  # Java may have ended already
                spark.stop()


def _rounds(work: Callable[[], Summary], pause: float | None, is_alive: Callable[[], bool], log_file: Path) -> bool:
    former: list[str] | None = None
    while True:
        started = time.monotonic()
        broken = False
        try:
            summary = work()
            broken = bool(summary.violations)
            warnings = _warnings(summary)
            # Print nothing for a round that found nothing new.
            if any(summary.landed.values()) or warnings != former:
                _show(summary, time.monotonic() - started)
            for warning in [] if warnings == former else warnings:
                say(warning)
            former = warnings
        except Exception as error:
            cause = f"{_cause_of(error)} (full output: {log_file})"
            # A pipeline that runs for months must survive a server that is down for a while. Without Java it cannot
            # continue, but a supervisor can start it again.
            if pause is None or not is_alive():
                raise CliError(f"the pipeline failed; the next run continues from here: {cause}") from error
            say(f"this round failed; the next one continues from here: {cause}")
            former = None  # so that the next round that succeeds is printed
        if pause is None:
            return broken
        time.sleep(max(pause - (time.monotonic() - started), 0))


def _hours(text: str) -> int:
    """Return a duration in whole hours, rounded up: delta-rs counts in hours."""
    return math.ceil(parse_duration(text) / 3600)


def _checked(url: str | None, queues: list[str]) -> str:
    """Return the URL of a server that answers; warn of queues that it does not know."""
    from tampu.spark.options import ReadOptions
    from tampu.spark.server import QueueServer

    if any("," in queue for queue in queues):
        raise UsageError("--queue takes one queue; repeat the option for others")
    options = ReadOptions.parse({"url": resolve_url(url), "queue": ",".join(queues)})
    for queue in options.queues:
        with QueueServer(options.url, queue) as server:
            keys = server.keys
            if not server.call("EXISTS", keys.events, keys.dlq, keys.stream, patience_secs=SERVER_PATIENCE_SECS):
                say(f"warning: queue {queue!r} does not exist yet")
    return options.url


def _is_alive(spark: Any) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:  # Java has ended
        return False


def _cause_of(error: Exception) -> str:
    """Return the one line of an error that says what happened: Spark wraps it in stack traces of two languages."""
    text = without_colors(str(error))
    if isinstance(error, Error | OSError):
        return text
    # The last line of a Python traceback, and the last cause of a Java one, is the original error.
    found = re.findall(
        r"^\s*(?:Caused by: )?((?:tampu\.|(?=[\w.]+(?:Error|Exception):))[\w.]+): (.+)$", text, re.MULTILINE
    )
    if found:
        name, line = found[-1]
        return f"{name.rpartition('.')[2]}: {line.strip()}"[:500]
    return f"{type(error).__name__}: {one_line(text, 300)}"


@contextlib.contextmanager
def _steps(*, is_repeated: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step: in one line with a spinner on a terminal, line by line elsewhere.

    If rounds are repeated, a log gets only their results: the steps would add several lines per round for months.
    """
    console = console_of(sys.stderr)
    if not console.is_terminal:
        yield lambda step: None if is_repeated else say(f"{step} ...")
        return
    with console.status("") as status:
        yield lambda step: status.update(f"{printable(step)} ...")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """End the work at once on SIGTERM and Ctrl-C. The next run completes whatever was interrupted."""
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
    prefix = f"landed {_counts(summary.landed)}; " if summary.landed else ""
    write_line(
        f"{prefix}computed {plural(summary.silver_partitions, 'partition')} of silver and "
        f"{summary.gold_partitions:,} of gold in {took:.1f} s"
    )


def _warnings(summary: Summary) -> list[str]:
    found = []
    if count := summary.trimmed.get("events"):
        found.append(f"warning: {count:,} events in total were trimmed before they could be landed")
    if count := summary.trimmed.get("dlq"):  # usually on purpose: a replay removes the letter
        lost = plural(count, "dead letter")
        found.append(f"{lost} in total had been replayed, removed or trimmed before being landed")
    if summary.violations:
        count = sum(one.jobs for one in summary.violations)
        found.append(f"warning: {plural(count, 'payload')} broke a contract: see the table gold_violations")
    return found


def _counts(rows: Mapping[str, int]) -> str:
    """Return numbers of rows by stream as text: `617 events and 39 dead letters`."""
    nouns = {"events": "event", "dlq": "dead letter", "repairs": "repair"}
    *others, last = (plural(count, nouns[stream]) for stream, count in rows.items())
    return " and ".join(filter(None, [", ".join(others), last]))


# --- without Spark


@app.command()
def check(
    queue: Queues,
    contracts: Annotated[
        str, Option(metavar="FILE", help="Rules for payloads: a TOML or JSON file, or module:name of a mapping.")
    ],
    lake: Annotated[
        Path | None, Option(metavar="DIR", help="Store the result in this lake (gold_violations).", file_okay=False)
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check the payloads of waiting and delayed jobs and of dead letters. The exit code is 1 if one breaks a rule.

    Needs neither Spark nor Java.
    """
    _require()
    from tampu.spark.lake.contracts import Contracts, check_queue, publish
    from tampu.spark.lake.folder import lake_folder
    from tampu.spark.lake.rows import published

    rules = Contracts.load(contracts)
    folder = None if lake is None else lake_folder(lake)
    if folder is not None:
        published(folder)
    checked_url = _checked(url, queue)
    results = [check_queue(checked_url, one, rules) for one in queue]
    checked = sum(count for count, _ in results)
    found = [violation for _, violations in results for violation in violations]
    if folder is not None:
        publish(folder, queue, found)
    if as_json:
        write_json({"checked": checked, "violations": [asdict(one) for one in found]})
    elif found:
        rows = FittingTable(
            *("jobs", "queue", "stream", "name", "field", "rule", "sample", "job"),
            numbers=("jobs",),
            spare=("job", "stream", "queue"),
        )
        for one in found:
            rows.add_row(
                cell(f"{one.jobs:,}", "red"),
                *map(cell, (one.queue, one.stream, one.name, one.field, one.rule, one.sample, one.sample_job_id)),
            )
        show(rows)
    else:
        write_line(f"{plural(checked, 'payload')}: no violations")
    if found:
        raise typer.Exit(ERROR)


@app.command()
def report(
    lake: Lake,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="Where to write the page.", dir_okay=False)
    ] = Path("report.html"),
    queue: Annotated[
        list[str] | None, queue_option(help="Show only this queue. Can be given more than once. Default: all.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DURATION", help="Show only the last 24h, 7d, ...", show_default="all"),
    ] = None,
) -> None:
    """Write one HTML page with plots from the lake. Needs neither Spark nor Java nor a server."""
    _require()
    from tampu.spark.lake.report import write_report

    past = None if since is None else timedelta(seconds=parse_duration(since))
    write_line(f"wrote {write_report(lake, output, queues=queue or (), since=past)}")


@app.command("show")
def show_tables(lake: Lake, as_json: AsJson = False) -> None:
    """List the tables of the lake: rows, files, size, version. Needs neither Spark nor Java."""
    _require()
    from tampu.spark.lake.folder import lake_folder
    from tampu.spark.lake.rows import published, sql_name
    from tampu.spark.lake.table import Table

    state = published(lake)
    rows: list[dict[str, Any]] = []
    for name, version in state.tables.items():
        files = Table(lake_folder(lake), name).files(version)
        counts = {"rows": sum(file.rows for file in files), "files": len(files)}
        rows.append({"table": sql_name(name), "version": version, **counts, "bytes": sum(file.size for file in files)})
    if as_json:
        write_json({"round": state.round, "published_at": state.published_at, "tables": rows})
        return
    numbers = ("version", "rows", "files")
    shown = table("table", *numbers, "size", numbers=(*numbers, "size"))
    for row in rows:
        shown.add_row(cell(row["table"]), *(f"{row[key]:,}" for key in numbers), size(row["bytes"]))
    show(shown)


@app.command()
def sql(
    query: Annotated[str, Argument(metavar="SQL", help='SQL query, such as "SELECT name, failures FROM silver_jobs".')],
    lake: Lake,
    as_json: AsJson = False,
) -> None:
    """Query the lake with SQL (DataFusion). Needs neither Spark nor Java. `tampu pipeline show` lists the tables."""
    _require()
    from tampu.spark.lake.folder import lake_folder
    from tampu.spark.lake.rows import published
    from tampu.spark.lake.rows import query as run_query

    published(lake)
    try:
        found = run_query(lake_folder(lake), query)
    except Exception as error:
        if isinstance(error, Error):
            raise
        raise UsageError(f"the query failed: {one_line(error, 500)}") from error
    rows = found.to_pylist()
    if as_json:
        write_json(rows)
        return
    shown = table(*found.column_names)
    for row in rows:
        shown.add_row(*(cell("" if value is None else value) for value in row.values()))
    show(shown)


@app.command()
def compact(lake: Lake) -> None:
    """Merge small files. Readers see the same rows before and after. Needs neither Spark nor Java."""
    _require()
    from tampu.spark.lake import upkeep

    done = upkeep.compact(_existing(lake))
    merged = f"merged {plural(done.merged, 'file')} into {done.written:,}"
    write_line(merged if done.merged else "there are no files to merge")


@app.command()
def vacuum(lake: Lake, keep: Keep = "2h") -> None:
    """Delete files that no reader needs, and files left by killed runs. Needs neither Spark nor Java."""
    _require()
    from tampu.spark.lake import upkeep

    done = upkeep.vacuum(_existing(lake), _hours(keep))
    write_line(f"deleted {plural(done.deleted, 'file')}")


@app.command()
def retain(lake: Lake, bronze: Annotated[float, duration_option(help="Keep rows of bronze this long (90d).")]) -> None:
    """Remove the events, dead letters and repairs of old days from bronze. Silver and gold keep their rows.

    `vacuum` then deletes the files.
    """
    _require()
    from tampu.spark.lake import upkeep

    done = upkeep.retain(_existing(lake), math.ceil(bronze / 86400))
    write_line(f"removed {_counts(done.retired)} from bronze")
    if any(done.kept.values()):
        why = "in their queues, some jobs were created at an unknown time"
        say(f"kept {_counts(done.kept)} of jobs whose IDs are not ULIDs: {why}")


def _existing(lake: Path) -> Path:
    """Return the folder of a lake that exists and can be written; the lock would create a missing one."""
    from tampu.spark.lake.folder import writable_lake
    from tampu.spark.lake.rows import published

    folder = writable_lake(lake)
    published(folder)
    return folder


def _require(*, spark: bool = False) -> None:
    from tampu.spark.session import require_lake, require_spark

    if spark:
        require_spark()
    require_lake()


# --- with Spark


@app.command()
def rebuild(
    lake: Lake,
    first_day: Annotated[
        str, Option("--from", metavar="DAY", help="Only jobs from this day on (2026-01-31).", show_default="all")
    ] = "",
    master: Master = None,
) -> None:
    """Compute silver and gold again from bronze."""
    _require(spark=True)
    from tampu.spark.lake.folder import LOG_NAME, sole_writer

    try:
        first_day = first_day and date.fromisoformat(first_day).isoformat()
    except ValueError:
        raise UsageError(f"--from must be a day such as 2026-01-31; got {first_day!r}") from None
    folder = _existing(lake)
    with sole_writer(folder):  # a second pipeline is refused before Spark is started
        pass
    try:
        with _session(master, None, folder / LOG_NAME) as (spark, on_step):
            from tampu.spark.lake.pipeline import Pipeline

            # No queue is read, so any URL will do.
            pipeline = Pipeline(spark, resolve_url(None), ["default"], folder, on_step=on_step)
            _rounds(lambda: pipeline.rebuild(first_day), None, lambda: True, folder / LOG_NAME)
    except Stopped as stop:
        say("stopped; run it again, or the pipeline, to continue")
        raise typer.Exit(stop.exit_code) from None
