"""`tampu pipeline`: build a lake of Delta tables from the events of queues, query it, keep it small, report on it."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import sys
import time
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tampu.base.checks import one_line, without_colors
from tampu.base.units import plural, size
from tampu.cli.errors import ERROR, INTERRUPTED, OK, TERMINATED, CliError, UsageError
from tampu.cli.options import AsJson, Url, queue_option
from tampu.cli.output import (
    cell,
    console_of,
    printable,
    say,
    show,
    silence_py4j,
    write_json,
    write_json_line,
    write_line,
)
from tampu.cli.tables import FittingTable
from tampu.cli.units import parse_duration
from tampu.errors import Error
from tampu.redis.settings import resolve_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tampu.spark.lake.contracts import Contracts
    from tampu.spark.lake.pipeline import Summary
    from tampu.spark.lake.store import Store

app = typer.Typer(
    name="pipeline",
    help="Build a lake of Delta tables from queue events with Spark; query it and report on it.",
    no_args_is_help=True,
)

#: How long to wait for the server's answer before Spark is started, in seconds.
SERVER_PATIENCE_SECS = 5.0

Lake = Annotated[str, typer.Option("--lake", metavar="DIR|URI", help="The folder of the lake, or s3://bucket/lake.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Setting of the object store, such as aws_region=eu-west-1; overrides the environment. Can be repeated.",
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="Setting of Spark, as for spark-submit. Can be repeated."),
]
Queues = Annotated[list[str], queue_option(help="Queue to read. Can be given more than once.")]
Master = Annotated[
    str | None,
    typer.Option(
        "--master", metavar="URL", envvar="TAMPU_SPARK_MASTER", help="The Spark master.", show_default="local[*,4]"
    ),
]
Keep = Annotated[
    str,
    typer.Option(
        "--keep", metavar="DURATION", help="Keep replaced files this long (2h, 1d), for readers that have opened them."
    ),
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
        str | None,
        typer.Option("--every", metavar="DURATION", help="Repeat at this interval (10s, 5m).", show_default="once"),
    ] = None,
    master: Master = None,
    max_per_batch: Annotated[
        int, typer.Option("--max-per-batch", min=1, help="Maximum number of entries per batch.")
    ] = 1_000_000,
    keep: Keep = "2h",
    contracts: Annotated[
        str | None,
        typer.Option(
            "--contracts",
            metavar="FILE",
            help="Also check payloads against these rules; exit with 1 if one breaks them.",
        ),
    ] = None,
    storage_option: StorageOptions = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Land new events and dead letters, and bring the tables up to date.

    If a run is killed, even by kill -9, the next one continues from there. With --every, the command repeats until it
    receives a signal. Small files are merged after each run; every 10 runs, replaced files are deleted.
    """
    pause = None if every is None else parse_duration(every)
    if pause is not None and pause <= 0:
        raise UsageError(f"--every must be longer than 0; got {every!r}")
    keep_hours = _hours(keep)
    try:
        broken = build_lake(
            url, queue, lake, pause=pause, master=master, max_per_batch=max_per_batch, keep_hours=keep_hours,
            contracts=contracts, storage_options=_pairs("--storage-option", storage_option),
            conf=_pairs("--conf", conf), as_json=as_json,
        )  # fmt: skip
    except Stopped as stop:
        say("stopped; the next run continues from here")
        raise typer.Exit(OK if pause is not None else stop.exit_code) from None
    if broken:
        raise typer.Exit(ERROR)


def build_lake(
    url: str | None,
    queues: list[str],
    lake: str | Path,
    *,
    pause: float | None = None,
    master: str | None = None,
    max_per_batch: int = 1_000_000,
    keep_hours: int = 2,
    contracts: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    conf: Mapping[str, str] | None = None,
    as_json: bool = False,
) -> bool:
    """Run the pipeline once, or repeatedly with a pause in between; a signal raises `Stopped`.

    Everything that can be checked is checked before Spark is started. Returns whether a payload breaks its contract.
    """
    from tampu.spark.session import require_lake, require_spark

    require_spark()
    require_lake()
    from tampu.spark.lake.folder import LakeVersion, sole_writer, writable_lake

    rules = None if contracts is None else _contracts(contracts)
    store = writable_lake(lake, storage_options)
    checked_url = _checked(url, queues)
    with sole_writer(store):  # a second pipeline on one lake, and a lake of a newer version, are refused here
        LakeVersion.load(store)
    log_file = _log_file(store)
    with _session(master, conf, log_file, is_repeated=pause is not None) as (spark, on_step):
        from tampu.spark.lake.pipeline import Pipeline

        pipeline = Pipeline(
            spark, checked_url, queues, store, max_per_batch=max_per_batch, keep_hours=keep_hours, rules=rules,
            on_step=on_step,
        )  # fmt: skip
        try:
            return _rounds(pipeline.run, pause, lambda: _is_alive(spark), log_file, as_json=as_json)
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


def _rounds(
    work: Callable[[], Summary],
    pause: float | None,
    is_alive: Callable[[], bool],
    log_file: Path,
    *,
    as_json: bool = False,
) -> bool:
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
                took = round(time.monotonic() - started, 1)
                write_json_line(asdict(summary) | {"seconds": took}) if as_json else _show(summary, took)
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


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    """Return the settings of a repeated option."""
    pairs = [text.partition("=") for text in given or ()]
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise UsageError(f"{option} takes key=value; got {wrong[0]!r}")  # not the value: it may be a secret
    return {key: value for key, _, value in pairs}


def _store(lake: str, storage_option: list[str] | None = None) -> Store:
    """Return the store of a lake; name the extra that is missing."""
    from tampu.spark.session import require_lake

    require_lake()
    from tampu.spark.lake.store import Store

    return Store.of(lake, _pairs("--storage-option", storage_option))


def _log_file(lake: Store) -> Path:
    """Return the file for the output of Java: in a local lake, or in the cache."""
    from tampu.spark.lake.folder import LOG_NAME
    from tampu.spark.session import cache_dir

    return (lake.folder or cache_dir()) / LOG_NAME


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
        found.append(
            f"{plural(count, 'dead letter')} in total had been replayed, removed or trimmed before being landed"
        )
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
        str,
        typer.Option(
            "--contracts", metavar="FILE", help="Rules for payloads: a TOML or JSON file, or module:name of a mapping."
        ),
    ],
    lake: Annotated[
        str | None,
        typer.Option("--lake", metavar="DIR|URI", help="Store the result in this lake (gold_violations)."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
) -> None:
    """Check the payloads of waiting and delayed jobs and of dead letters. The exit code is 1 if one breaks a rule.

    Needs neither Spark nor Java.
    """
    from tampu.spark.session import require_lake

    require_lake()
    from tampu.spark.lake.contracts import check_queue, publish
    from tampu.spark.lake.rows import published

    rules = _contracts(contracts)
    store = None if lake is None else _store(lake, storage_option)
    if store is not None:
        published(store)
    checked_url = _checked(url, queue)
    results = [check_queue(checked_url, one, rules) for one in queue]
    checked = sum(count for count, _ in results)
    found = [violation for _, violations in results for violation in violations]
    if store is not None:
        publish(store, queue, found)
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


def _contracts(source: str) -> Contracts:
    from tampu.spark.lake.contracts import Contracts

    return Contracts.load(source)


@app.command()
def report(
    lake: Lake,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.", dir_okay=False)
    ] = Path("report.html"),
    queue: Annotated[
        list[str] | None, queue_option(help="Show only this queue. Can be given more than once. Default: all.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DURATION", help="Show only the last 24h, 7d, ...", show_default="all"),
    ] = None,
    storage_option: StorageOptions = None,
) -> None:
    """Write one HTML page with plots from the lake. Needs neither Spark nor Java nor a server."""
    store = _store(lake, storage_option)
    from tampu.spark.lake.report import write_report

    past = None if since is None else timedelta(seconds=parse_duration(since))
    write_line(f"wrote {write_report(store, output, queues=queue or (), since=past)}")


@app.command("show")
def show_tables(lake: Lake, as_json: AsJson = False, storage_option: StorageOptions = None) -> None:
    """List the tables of the lake: rows, files, size, version. Needs neither Spark nor Java."""
    store = _store(lake, storage_option)
    from rich.table import Table as RichTable

    from tampu.spark.lake.rows import published, sql_name
    from tampu.spark.lake.table import Table

    state = published(store)
    rows: list[dict[str, Any]] = []
    for name, version in state.tables.items():
        files = Table(store, name).files(version)
        rows.append(
            {
                "table": sql_name(name),
                "version": version,
                "rows": sum(file.rows for file in files),
                "files": len(files),
                "bytes": sum(file.size for file in files),
            }
        )
    if as_json:
        write_json({"round": state.round, "published_at": state.published_at, "tables": rows})
        return
    table = RichTable(box=None, header_style="dim", pad_edge=False)
    for column in ("table", "version", "rows", "files", "size"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for row in rows:
        table.add_row(
            cell(row["table"]), *(f"{row[key]:,}" for key in ("version", "rows", "files")), size(row["bytes"])
        )
    show(table)


@app.command()
def status(
    queue: Queues,
    lake: Lake,
    max_lag: Annotated[
        str | None,
        typer.Option(
            "--max-lag",
            metavar="DURATION",
            help="Exit with 1 if entries wait that long to be published (10m).",
            show_default="no limit",
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
) -> None:
    """Say when the lake was published, and how many entries of its queues it does not have. Needs no Spark."""
    store = _store(lake, storage_option)
    from tampu.spark.lake.bronze import STREAMS, entries_behind
    from tampu.spark.lake.rows import published
    from tampu.spark.lake.table import Table

    state, checked_url = published(store), _checked(url, queue)
    age = datetime.now(UTC) - datetime.fromisoformat(state.published_at)
    behind: dict[str, dict[str, int | None]] = {}
    for stream in STREAMS:
        name = f"bronze/{stream}"
        behind[stream] = entries_behind(checked_url, queue, Table(store, name), state.tables.get(name))
    # Rounds without news publish nothing: a lake that has everything is fresh, whatever its age.
    is_behind = any(count != 0 for counts in behind.values() for count in counts.values())
    is_late = max_lag is not None and is_behind and age.total_seconds() > parse_duration(max_lag)
    if as_json:
        seconds = round(age.total_seconds())
        write_json({"published_at": state.published_at, "age_secs": seconds, "behind": behind, "is_late": is_late})
    else:
        write_line(f"round {state.round}, published at {state.published_at}, {age.total_seconds():,.0f} s ago")
        for stream, counts in behind.items():
            for name, count in counts.items():
                write_line(f"{stream} of {name}: {'unknown' if count is None else f'{count:,}'} entries behind")
    if is_late:
        raise typer.Exit(ERROR)


@app.command()
def sql(
    query: Annotated[
        str, typer.Argument(metavar="SQL", help='SQL query, such as "SELECT name, failures FROM silver_jobs".')
    ],
    lake: Lake,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
) -> None:
    """Query the lake with SQL (DataFusion). Needs neither Spark nor Java. `tampu pipeline show` lists the tables."""
    store = _store(lake, storage_option)
    from rich.table import Table as RichTable

    from tampu.spark.lake.rows import published
    from tampu.spark.lake.rows import query as run_query

    published(store)
    try:
        found = run_query(store, query)
    except Exception as error:
        if isinstance(error, Error):
            raise
        raise UsageError(f"the query failed: {one_line(error, 500)}") from error
    rows = found.to_pylist()
    if as_json:
        write_json(rows)
        return
    table = RichTable(box=None, header_style="dim", pad_edge=False)
    for name in found.column_names:
        table.add_column(name)
    for row in rows:
        table.add_row(*(cell("" if value is None else value) for value in row.values()))
    show(table)


@app.command()
def compact(lake: Lake, storage_option: StorageOptions = None) -> None:
    """Merge small files. Readers see the same rows before and after. Needs neither Spark nor Java."""
    store = _existing(lake, storage_option)
    from tampu.spark.lake import upkeep

    done = upkeep.compact(store)
    write_line(
        f"merged {plural(done.merged, 'file')} into {done.written:,}" if done.merged else "there are no files to merge"
    )


@app.command()
def vacuum(lake: Lake, keep: Keep = "2h", storage_option: StorageOptions = None) -> None:
    """Delete files that no reader needs, and files left by killed runs. Needs neither Spark nor Java."""
    store = _existing(lake, storage_option)
    from tampu.spark.lake import upkeep

    done = upkeep.vacuum(store, _hours(keep))
    write_line(f"deleted {plural(done.deleted, 'file')}")


@app.command()
def retain(
    lake: Lake,
    bronze: Annotated[str, typer.Option("--bronze", metavar="DURATION", help="Keep rows of bronze this long (90d).")],
    storage_option: StorageOptions = None,
) -> None:
    """Remove the events, dead letters and repairs of old days from bronze. Silver and gold keep their rows.

    `vacuum` then deletes the files.
    """
    store = _existing(lake, storage_option)
    from tampu.spark.lake import upkeep

    done = upkeep.retain(store, math.ceil(parse_duration(bronze) / 86400))
    write_line(f"removed {_counts(done.retired)} from bronze")
    if any(done.kept.values()):
        say(
            f"kept {_counts(done.kept)} of jobs whose IDs are not ULIDs: in their queues, some jobs were created at an "
            "unknown time"
        )


@app.command()
def forget(
    lake: Lake,
    job: Annotated[list[str], typer.Option("--job", metavar="ID", help="ID of a job. Can be given more than once.")],
    storage_option: StorageOptions = None,
) -> None:
    """Remove the rows of jobs from every table, and delete their files at once. Sums that count them stay.

    Readers that have opened an older version lose it. Needs neither Spark nor Java.
    """
    store = _existing(lake, storage_option)
    from tampu.spark.lake import upkeep
    from tampu.spark.lake.rows import sql_name

    found = upkeep.forget(store, job)
    for name, count in found.items():
        write_line(f"{sql_name(name)}: {plural(count, 'row')}")
    if not found:
        write_line("the lake has no rows of these jobs")


#: Catalog to the statement that makes a table of the lake known to it.
STATEMENTS = {
    "athena": "CREATE EXTERNAL TABLE {name} LOCATION '{uri}' TBLPROPERTIES ('table_type' = 'DELTA');",
    "databricks": "CREATE TABLE {name} USING DELTA LOCATION '{uri}';",
    "duckdb": "CREATE VIEW {name} AS SELECT * FROM delta_scan('{uri}');",
    "snowflake": "CREATE EXTERNAL TABLE {name} WITH LOCATION = @{stage}/{path}/ FILE_FORMAT = (TYPE = PARQUET) "
    "TABLE_FORMAT = DELTA AUTO_REFRESH = FALSE;",
    "trino": "CALL delta.system.register_table(schema_name => 'tampu', table_name => '{name}', "
    "table_location => '{uri}');",
}


@app.command()
def ddl(
    lake: Lake,
    catalog: Annotated[str, typer.Option("--for", metavar="|".join(STATEMENTS), help="The catalog or engine.")],
    stage: Annotated[
        str, typer.Option("--stage", metavar="NAME", help="Snowflake's stage, whose location is the lake.")
    ] = "tampu",
    storage_option: StorageOptions = None,
) -> None:
    """Print SQL statements that make the lake's tables known to a catalog."""
    store = _store(lake, storage_option)
    from tampu.spark.lake.rows import published, sql_name

    if catalog not in STATEMENTS:
        raise UsageError(f"--for must be one of {', '.join(STATEMENTS)}; got {catalog!r}")
    for path in published(store).tables:
        uri = f"{store}/{path}".replace("'", "''")
        write_line(STATEMENTS[catalog].format(name=sql_name(path), uri=uri, path=path, stage=stage))


def _existing(lake: str, storage_option: list[str] | None) -> Store:
    """Return the store of a lake that exists and can be written; the lock would create a missing one."""
    store = _store(lake, storage_option)
    from tampu.spark.lake.folder import writable_lake
    from tampu.spark.lake.rows import published

    published(store)
    return writable_lake(store)


# --- with Spark


@app.command()
def rebuild(
    lake: Lake,
    first_day: Annotated[
        str, typer.Option("--from", metavar="DAY", help="Only jobs from this day on (2026-01-31).", show_default="all")
    ] = "",
    master: Master = None,
    storage_option: StorageOptions = None,
    conf: Conf = None,
) -> None:
    """Compute silver and gold again from bronze."""
    from tampu.spark.session import require_lake, require_spark

    require_spark()
    require_lake()
    from tampu.spark.lake.folder import sole_writer

    try:
        first_day = first_day and date.fromisoformat(first_day).isoformat()
    except ValueError:
        raise UsageError(f"--from must be a day such as 2026-01-31; got {first_day!r}") from None
    store = _existing(lake, storage_option)
    with sole_writer(store):  # a second pipeline is refused before Spark is started
        pass
    try:
        with _session(master, _pairs("--conf", conf), _log_file(store)) as (spark, on_step):
            from tampu.spark.lake.pipeline import Pipeline

            # No queue is read, so any URL will do.
            pipeline = Pipeline(spark, resolve_url(None), ["default"], store, on_step=on_step)
            _rounds(lambda: pipeline.rebuild(first_day), None, lambda: True, _log_file(store))
    except Stopped as stop:
        say("stopped; run it again, or the pipeline, to continue")
        raise typer.Exit(stop.exit_code) from None
