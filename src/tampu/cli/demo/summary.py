"""What came of the day: a table by task, whether anything was lost, and what to try next."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tampu.cli.output import cell
from tampu.cli.units import duration, number, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tampu.cli.demo.tally import Tally


def summary(
    added: dict[str, int], tally: Tally, *, replayed: int, secs: float, url: str, is_live: bool
) -> RenderableType:
    """The end of the demo."""
    left = sum(one.dlq for one in tally.snapshots.values())
    done = tally.total("completed")
    lost = sum(added.values()) - done - left
    verdict = Text.assemble(
        (f"{sum(added.values()):,} jobs in {secs:.1f} s: ", "bold"),
        (f"{done:,} done", "green"),
        f", {plural(tally.total('retry-scheduled'), 'retry', 'retries')}, {replayed:,} replayed, ",
        (plural(left, "dead letter"), "red" if left else ""),
        " left, ",
        (f"{lost:,} lost", "green" if not lost else "bold red"),
        ".",
    )
    return Group(Text(""), _by_task(added, tally, is_live=is_live), Text(""), verdict, Text(""), *_next(tally, url))


def _by_task(added: dict[str, int], tally: Tally, *, is_live: bool) -> Table:
    made = Table(box=ROUNDED if is_live else None, border_style="dim", header_style="dim", pad_edge=is_live)
    made.add_column("task", no_wrap=True)
    for column in ("added", "done", "failures", "retries", "died", "typical run"):
        made.add_column(column, justify="right")
    for name, count in added.items():
        task = tally.tasks.get(name)
        counts = task.counts if task else {}
        made.add_row(
            cell(name, "bold"),
            number(count),
            cell(number(counts.get("completed", 0)), "green"),
            number(counts.get("failed", 0)),
            cell(number(counts.get("retry-scheduled", 0)), "yellow" if counts.get("retry-scheduled") else ""),
            cell(number(counts.get("dlq", 0)), "red" if counts.get("dlq") else ""),
            duration(task.typical_ms if task else None),
        )
    return made


def _next(tally: Tally, url: str) -> list[Text]:
    commands = [
        ("tampu inspect", "what is in the queues"),
        ("tampu dlq peek images --full", "the photo that is none, with its traceback"),
    ]
    if tally.example_job:
        commands.append((f"tampu job why {tally.example_job}", "a payment's life: failed, dead, replayed, done"))
    commands += [
        ("tampu repeatable list reports", "what is due when"),
        ("tampu doctor", "is all well?"),
    ]
    width = max(len(command) for command, _ in commands)
    lines = [Text("The shop's data are kept. Have a look:", style="bold")]
    lines += [Text(f"  {command}") for command in (*_activation(), f"export TAMPU_URL={shlex.quote(url)}")]
    lines += [Text.assemble(f"  {command:<{width}}  ", (f"# {about}", "dim")) for command, about in commands]
    return lines


def _activation() -> list[str]:
    """What makes `tampu` a command here: whoever ran `make demo` has it in an environment of its own."""
    activate = Path(sys.executable).parent / "activate"
    if shutil.which("tampu") or not activate.exists():
        return []
    here = Path.cwd()
    return [f"source {shlex.quote(str(activate.relative_to(here) if activate.is_relative_to(here) else activate))}"]
