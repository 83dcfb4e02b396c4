"""The demo's last act: the day's events as a lake of tables and a report, where Spark and Java are there."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import typer

from tampu.cli.exits import INTERRUPTED
from tampu.cli.output import write_line
from tampu.cli.pipeline import Stopped, build_lake
from tampu.errors import ConfigError
from tampu.spark.session import SHORT_LIVED, require_spark

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HOW_TO_GET_IT = "With Spark the demo ends with a report of the day: pip install 'tampu[spark]', and Java 17 or later."


def write_history(folder: Path, url: str, queues: Sequence[str], *, wanted: bool | None) -> None:
    """Run the pipeline over the demo's events and write its report into the demo's folder.

    `wanted=None`: if it can be had; otherwise one line tells how to get it.
    """
    if wanted is False:
        return
    try:
        require_spark()
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
