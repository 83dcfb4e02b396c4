"""`tampu pipeline run` and `tampu pipeline report`: the lake of a queue's history, and the page people look at."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tampu.cli.options import Url  # noqa: TC001 - typer looks at it when it runs
from tampu.cli.output import stderr_console
from tampu.redis.settings import resolve_url

if TYPE_CHECKING:
    from tampu.spark.lake.pipeline import Summary

app = typer.Typer(
    name="pipeline",
    help="Build a lake of Parquet tables from a queue's events with Spark, and a report from it.",
    no_args_is_help=True,
)

Lake = Annotated[Path, typer.Option("--lake", metavar="DIR", help="The folder of the lake; made if need be.")]


@app.command()
def run(
    queue: Annotated[list[str], typer.Option("--queue", "-q", metavar="QUEUE", help="A queue; may be given again.")],
    lake: Lake,
    url: Url = None,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="TIME", help="Run again and again, this far apart: 10s, 5m. Without it: once."),
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
    """Land new events and dead letters, and bring the tables up to date. Killed at any point, the next run goes on."""
    from tampu.spark.lake.pipeline import Pipeline
    from tampu.spark.options import WriteOptions, parse_duration
    from tampu.spark.session import spark_session

    pause = None if every is None else parse_duration(every, "--every")
    checked_url = WriteOptions.parse({"url": resolve_url(url)}).url
    console = stderr_console()
    logging.getLogger("py4j").setLevel(logging.ERROR)
    console.print("starting Spark ...")
    spark = spark_session("tampu-pipeline", master=master)
    pipeline = Pipeline(
        spark, checked_url, queue, lake, max_per_batch=max_per_batch, on_step=lambda step: console.print(f"{step} ...")
    )
    try:
        while True:
            started = time.monotonic()
            try:
                _show(pipeline.run(), time.monotonic() - started)
            except Exception as error:
                if pause is None:
                    raise
                # A server that is away for a while must not end a pipeline that is to run for months.
                typer.echo(f"this round failed and the next goes on from here: {str(error)[:500]}", err=True)
            if pause is None:
                return
            time.sleep(max(pause - (time.monotonic() - started), 0))
    except KeyboardInterrupt:
        console.print("stopped; the next run goes on from here")
    finally:
        spark.stop()


def _show(summary: Summary, took: float) -> None:
    landed = ", ".join(f"{count:,} {stream}" for stream, count in summary.landed.items())
    typer.echo(
        f"landed {landed}; computed {summary.silver_partitions} partitions of silver and {summary.gold_partitions} of "
        f"gold in {took:.1f} s"
    )
    for stream, count in summary.trimmed.items():
        if count:
            typer.echo(f"warning: {count:,} {stream} in all were trimmed before they could be landed", err=True)


@app.command()
def report(
    lake: Lake,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page with plots from the lake. It needs neither Spark nor a server."""
    from tampu.spark.lake.report import write_report

    typer.echo(f"wrote {write_report(lake, output)}")
