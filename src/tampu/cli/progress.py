"""A progress bar on stderr for work that may take long; none where nobody would see it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tampu.cli.output import stderr_console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """`with progress_bar("removing", 1000) as done: done(100)`: `done` takes how many there are by now, in all."""
    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, completed=count)
