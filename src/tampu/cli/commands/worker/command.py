"""`tampu worker app:queue`: checks the options and runs a supervisor."""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tampu.cli.commands.worker.health import HealthServer
from tampu.cli.commands.worker.protocol import WorkerPlan
from tampu.cli.commands.worker.supervisor import Supervisor
from tampu.cli.errors import ERROR, OK, TERMINATED, UsageError
from tampu.cli.options import LogFormat, LogLevel, Url, choice_option, duration_option
from tampu.cli.output import set_up_logs, silence_py4j
from tampu.redis.settings import URL_VARIABLE, parse_url

logger = logging.getLogger("tampu.cli.worker")

JOB_LOGS = ("none", "failed", "all")
PLACES = ("local", "spark")

#: Options under their own heading in the help.
_operation = partial(Option, rich_help_panel="Operation")
_tuning = partial(Option, rich_help_panel="Tuning")
_spark = partial(Option, rich_help_panel="Spark")


def _by_queue(flag: str, **settings: Any) -> Any:
    """Return an option that takes numbers by queue, such as `critical=6,bulk=1`."""

    def parse(given: str) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for part in map(str.strip, given.split(",")):
            name, _, number = part.rpartition("=")
            if not name or not number.isdecimal():
                raise UsageError(f"{flag} takes queue names and numbers such as critical=6,bulk=1; got {part!r}")
            numbers[name] = int(number)
        return numbers

    return Option(flag, metavar="QUEUE=N,...", parser=parse, **settings)


def worker(
    targets: Annotated[
        list[str],
        Argument(
            metavar="APP[:QUEUE]...",
            help="module:attribute of a Queue, a list of Queues, or a Worker; or a module, for all its Queues.",
        ),
    ],
    processes: Annotated[
        int, Option("--processes", "-p", envvar="TAMPU_WORKER_PROCESSES", min=1, max=1000, help="Worker processes.")
    ] = 1,
    concurrency: Annotated[
        int | None,
        Option(
            *("--concurrency", "-c"),
            envvar="TAMPU_WORKER_CONCURRENCY",
            min=1,
            show_default="100",
            help="Concurrent jobs per process.",
        ),
    ] = None,
    weights: Annotated[
        dict[str, int] | None,
        _by_queue("--weights", show_default="1", help="Weight of a queue: jobs are fetched in proportion to it."),
    ] = None,
    reserve: Annotated[dict[str, int] | None, _by_queue("--reserve", help="Slots kept free for a queue.")] = None,
    limit: Annotated[dict[str, int] | None, _by_queue("--limit", help="Maximum slots that a queue may use.")] = None,
    reload: Annotated[
        bool, Option("--reload", help="Restart when a .py file in or below the current folder changes.")
    ] = False,
    health_port: Annotated[
        int | None, _operation("--health-port", min=0, max=65535, help="Serve GET /health and /metrics.")
    ] = None,
    health_host: Annotated[
        str, _operation("--health-host", help="Address to listen on; use 0.0.0.0 in a container.")
    ] = "127.0.0.1",
    health_silence: Annotated[
        float | None,
        duration_option(
            rich_help_panel="Operation",
            show_default="read timeout + 5s",
            help="Report unhealthy when the server has not answered for this long.",
        ),
    ] = None,
    log: LogFormat = "text",
    log_level: LogLevel = "info",
    log_jobs: Annotated[
        str, choice_option(JOB_LOGS, "--log-jobs", rich_help_panel="Operation", help="Which jobs to log.")
    ] = "failed",
    shutdown_deadline: Annotated[
        float | None,
        duration_option(
            rich_help_panel="Operation",
            show_default="30s",
            help="Maximum time for running jobs to finish after a stop signal.",
        ),
    ] = None,
    group: Annotated[str | None, _tuning(show_default="default", help="Consumer group.")] = None,
    max_attempts: Annotated[
        int | None, _tuning(min=0, show_default="5", help="Maximum number of attempts, unless the job sets it.")
    ] = None,
    batch: Annotated[int | None, _tuning(min=1, show_default="256", help="Maximum jobs fetched per read.")] = None,
    claim_after: Annotated[
        float | None,
        duration_option(
            rich_help_panel="Tuning", show_default="30s", help="Take over the jobs of a dead worker after this long."
        ),
    ] = None,
    results: Annotated[bool | None, _tuning(show_default="results", help="Store return values of tasks.")] = None,
    events: Annotated[bool | None, _tuning(show_default="events", help="Write events.")] = None,
    promoter: Annotated[
        bool | None, _tuning(show_default="promoter", help="Move delayed jobs into the queue when due.")
    ] = None,
    scheduler: Annotated[bool | None, _tuning(show_default="scheduler", help="Fire schedules when due.")] = None,
    on: Annotated[
        str, choice_option(PLACES, "--on", rich_help_panel="Spark", help="Run jobs on this machine or on Spark.")
    ] = "local",
    master: Annotated[
        str | None, _spark(metavar="URL", envvar="TAMPU_SPARK_MASTER", show_default="local[*,4]", help="Spark master.")
    ] = None,
    slots: Annotated[
        int | None,
        _spark(min=1, show_default="one per core", help="Number of workers; each is a task of one Spark job."),
    ] = None,
    url: Url = None,
) -> None:
    """Run jobs from one or more queues, in one or more supervised processes.

    With --on spark, jobs run in the slots of a Spark cluster instead.

    On the first Ctrl-C or SIGTERM, the worker finishes its running jobs and exits; on the second, at least a second
    later, it abandons them.

    `tampu worker list` lists the running workers.
    """
    if url is not None:
        parse_url(url)
        os.environ[URL_VARIABLE] = url  # used by queues without their own URL, here and in the children
    settings: dict[str, Any] = {
        "concurrency": concurrency,
        "weights": weights,
        "reserve": reserve,
        "limit": limit,
        "shutdown_deadline_secs": None if shutdown_deadline is None else round(shutdown_deadline),
        "group": group,
        "max_attempts": max_attempts,
        "read_count": batch,
        "claim_min_idle_ms": None if claim_after is None else max(round(claim_after * 1000), 1),
        "store_results": results,
        "events_enabled": events,
        "delayed_enabled": promoter,
        "run_scheduler": scheduler,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if on == "spark":
        _refuse_with_spark(processes=processes > 1, reload=reload, health_port=health_port is not None)
        set_up_logs(log, log_level, "worker")
        raise typer.Exit(_serve_on_spark(targets, given, master=master, slots=slots))
    if slots is not None:
        raise UsageError("--slots requires --on spark; use --processes for processes on this machine")
    logs = {"log_format": log, "log_level": log_level, "log_jobs": log_jobs}
    plan = WorkerPlan(targets=targets, settings=given, metrics=health_port is not None, processes=processes, **logs)
    set_up_logs(log, log_level, "worker")
    code = asyncio.run(_supervise(plan, processes, reload, health_port, health_host, health_silence))
    raise typer.Exit(code)


def _refuse_with_spark(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"--{name.replace('_', '-')} cannot be used with --on spark: leave it out")


def _serve_on_spark(
    targets: Sequence[str], settings: Mapping[str, Any], *, master: str | None, slots: int | None
) -> int:
    """Run until a signal and return the exit code. Targets and settings are checked before Spark is started."""
    if len(targets) != 1:
        raise UsageError(f"--on spark takes one target; got {len(targets)}. Use a list of queues such as app:queues")
    from tampu.cli.commands.worker.child import load  # imported here: a supervisor does not need Queue or Worker
    from tampu.worker import Worker

    found = load(targets)
    if isinstance(found, Worker):
        raise UsageError(f"{targets[0]} is a Worker, which cannot run on Spark: name its Queue instead")
    Worker(found, **settings)  # raises for invalid settings and queues without tasks, before executors start
    from tampu.spark.session import require_spark

    require_spark()
    from tampu.spark.worker import run_on_spark

    silence_py4j()
    log_file = Path(tempfile.gettempdir()) / f"tampu-worker-spark-{os.getpid()}.log"
    logger.info("starting Spark; its output goes to %s", log_file)
    # Until there is a worker to drain, a signal ends the process; Java ends with it.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    is_well = run_on_spark(targets[0], master=master, slots=slots, settings=settings, log_file=log_file)
    return OK if is_well else ERROR


async def _supervise(
    plan: WorkerPlan,
    processes: int,
    reloads: bool,
    health_port: int | None,
    health_host: str,
    max_silence_secs: float | None,
) -> int:
    supervisor = Supervisor(plan, processes, reloads=reloads)
    async with contextlib.AsyncExitStack() as stack:
        if health_port is not None:
            health = HealthServer(supervisor, health_host, health_port, max_silence_secs)
            logger.info("health endpoint at %s", await health.start())
            stack.push_async_callback(health.stop)
        if reloads:
            stack.callback(asyncio.create_task(_reload_on_changes(supervisor)).cancel)
        return await supervisor.run()


async def _reload_on_changes(supervisor: Supervisor) -> None:
    here = Path.cwd()
    async for path in changes(here):
        logger.info("%s changed: restarting", path.removeprefix(f"{here}/"))
        supervisor.reload()


# --- --reload

#: How often files are checked for changes, in seconds.
POLL_SECS = 0.3
#: Folders that contain no files of the user.
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
#: Maximum number of files watched.
MAX_FILES = 20_000


def python_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield (path, modification time in ns) of the Python files below a folder, except in hidden folders."""
    waiting = [str(folder)]
    seen = 0
    while waiting and seen < MAX_FILES:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # deleted, or no permission
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in SKIPPED:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.name.endswith(".py"):
                    seen += 1
                    yield entry.path, entry.stat().st_mtime_ns
            except OSError:
                continue


async def changes(folder: Path) -> AsyncIterator[str]:
    """Yield the path of a file that was changed, created or deleted, once per poll with changes."""
    known = await asyncio.to_thread(lambda: dict(python_files(folder)))
    while True:
        await asyncio.sleep(POLL_SECS)
        now = await asyncio.to_thread(lambda: dict(python_files(folder)))
        if now != known:
            different = {*now.items()} ^ {*known.items()}
            known = now
            yield min(path for path, _ in different)
