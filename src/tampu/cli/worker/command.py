"""`tampu worker app:queue`: checks the options and runs a supervisor."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tampu.cli.exits import UsageError
from tampu.cli.options import LogFormat, LogLevel, Url
from tampu.cli.units import parse_duration
from tampu.cli.worker.health import HealthServer
from tampu.cli.worker.logs import check_log_options, set_up_logs
from tampu.cli.worker.on_spark import serve_on_spark
from tampu.cli.worker.plan import WorkerPlan
from tampu.cli.worker.reload import changes
from tampu.cli.worker.supervisor import Supervisor
from tampu.redis.settings import URL_VARIABLE, parse_url

logger = logging.getLogger("tampu.cli.worker")

JOB_LOGS = ("none", "failed", "all")
_TUNING = "Tuning"
_OPERATION = "Operation"
_SPARK = "Spark"
PLACES = ("local", "spark")


def worker(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="APP:QUEUE...", help="module:attribute of a Queue, a list of them, or a Worker."),
    ],
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, max=1000, help="Worker processes.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, show_default="100", help="Jobs at once in each process.")
    ] = None,
    reload: Annotated[bool, typer.Option("--reload", help="Start anew when a .py file here changes.")] = False,
    health_port: Annotated[
        int | None,
        typer.Option(
            "--health-port", min=0, max=65535, help="Serve GET /health and /metrics.", rich_help_panel=_OPERATION
        ),
    ] = None,
    health_host: Annotated[
        str,
        typer.Option("--health-host", help="Where to serve them; 0.0.0.0 in a container.", rich_help_panel=_OPERATION),
    ] = "127.0.0.1",
    health_silence: Annotated[
        str | None,
        typer.Option(
            "--health-silence",
            metavar="DURATION",
            show_default="a read's wait + 5s",
            help="Unhealthy when a server has not answered for so long.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    log: LogFormat = "text",
    log_level: LogLevel = "info",
    log_jobs: Annotated[
        str,
        typer.Option("--log-jobs", metavar="|".join(JOB_LOGS), help="Which jobs to log.", rich_help_panel=_OPERATION),
    ] = "failed",
    shutdown_deadline: Annotated[
        str | None,
        typer.Option(
            "--shutdown-deadline",
            metavar="DURATION",
            show_default="30s",
            help="How long running jobs get after the signal to stop.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", show_default="default", help="Consumer group.", rich_help_panel=_TUNING)
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            "--max-attempts",
            min=0,
            show_default="25",
            help="Runs of a job that says nothing of its own.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, show_default="64", help="Most jobs of one read.", rich_help_panel=_TUNING),
    ] = None,
    claim_after: Annotated[
        str | None,
        typer.Option(
            "--claim-after",
            metavar="DURATION",
            show_default="30s",
            help="A dead worker's jobs are taken over after this.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    results: Annotated[
        bool | None,
        typer.Option("--results/--no-results", help="Store what tasks return.", rich_help_panel=_TUNING),
    ] = None,
    events: Annotated[
        bool | None, typer.Option("--events/--no-events", help="Write the events stream.", rich_help_panel=_TUNING)
    ] = None,
    promoter: Annotated[
        bool | None,
        typer.Option("--promoter/--no-promoter", help="Bring in delayed jobs too.", rich_help_panel=_TUNING),
    ] = None,
    scheduler: Annotated[
        bool | None,
        typer.Option("--scheduler/--no-scheduler", help="Fire repeatable jobs too.", rich_help_panel=_TUNING),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="|".join(PLACES), help="Where jobs run: here, or on Spark.", rich_help_panel=_SPARK
        ),
    ] = "local",
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            metavar="URL",
            envvar="TAMPU_SPARK_MASTER",
            show_default="local[*,4]",
            help="The Spark master.",
            rich_help_panel=_SPARK,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            min=1,
            show_default="one per core",
            help="Workers, each a task of one long Spark job.",
            rich_help_panel=_SPARK,
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Run the jobs of queues, in one or several supervised processes.

    With --on spark they run in the slots of a Spark cluster instead. A first Ctrl-C or SIGTERM drains, a second
    abandons what still runs.
    """
    if on not in PLACES:
        raise UsageError(f"--on must be one of {', '.join(PLACES)}; got {on!r}")
    check_log_options(log, log_level)
    if log_jobs not in JOB_LOGS:
        raise UsageError(f"--log-jobs must be one of {', '.join(JOB_LOGS)}; got {log_jobs!r}")
    if url is not None:
        parse_url(url)
        os.environ[URL_VARIABLE] = url  # what queues without a URL of their own use, here and in the children
    settings: dict[str, Any] = {
        "concurrency": concurrency,
        "shutdown_deadline_secs": None if shutdown_deadline is None else round(parse_duration(shutdown_deadline)),
        "group": group,
        "max_attempts": max_attempts,
        "read_count": batch,
        "claim_min_idle_ms": None if claim_after is None else max(round(parse_duration(claim_after) * 1000), 1),
        "store_results": results,
        "events_enabled": events,
        "delayed_enabled": promoter,
        "run_scheduler": scheduler,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if on == "spark":
        _refuse_with_spark(processes=processes > 1, reload=reload, health_port=health_port is not None)
        set_up_logs(log, log_level, "worker")
        raise typer.Exit(serve_on_spark(targets, given, master=master, slots=slots))
    if slots is not None:
        raise UsageError("--slots goes with --on spark; processes on this machine are --processes")
    plan = WorkerPlan(
        targets=targets,
        settings=given,
        log_format=log,
        log_level=log_level,
        log_jobs=log_jobs,
        metrics=health_port is not None,
    )
    silence_secs = None if health_silence is None else parse_duration(health_silence)
    set_up_logs(log, log_level, "worker")
    code = asyncio.run(_supervise(plan, processes, reload, health_port, health_host, silence_secs))
    raise typer.Exit(code)


def _refuse_with_spark(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"--{name.replace('_', '-')} is for workers on this machine: leave it out with --on spark")


async def _supervise(
    plan: WorkerPlan,
    processes: int,
    reloads: bool,
    health_port: int | None,
    health_host: str,
    max_silence_secs: float | None,
) -> int:
    supervisor = Supervisor(plan, processes, reloads=reloads)
    watching: asyncio.Task[None] | None = None
    health: HealthServer | None = None
    if health_port is not None:
        health = HealthServer(supervisor, health_host, health_port, max_silence_secs)
        logger.info("health at %s", await health.start())
    if reloads:
        watching = asyncio.create_task(_reload_on_changes(supervisor))
    try:
        return await supervisor.run()
    finally:
        if watching is not None:
            watching.cancel()
        if health is not None:
            await health.stop()


async def _reload_on_changes(supervisor: Supervisor) -> None:
    here = Path.cwd()
    async for path in changes(here):
        logger.info("%s changed: starting anew", path.removeprefix(f"{here}/"))
        supervisor.reload()
