"""What a command writes: tables and lines for people, JSON for programs; news and questions go to stderr.

Everything that came from a server is made printable first: a queue's name or an error's text may hold control
characters that would drive the terminal, or markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rich.console import RenderableType

#: Columns of tables that go into a pipe or a file, where nothing is cut off.
PIPE_WIDTH = 240
#: How often it is looked whether the reader of a pipe has gone, in seconds.
READER_CHECK_SECS = 0.2


def use_lenient_streams() -> None:
    """A terminal that cannot show a character shows a replacement, rather than ending the command."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something else, or closed
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def stdout_console() -> Console:
    """The console for results."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """The console for news, questions, progress bars and errors."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    # A pipe has no width; a table in it is for `less -S` or a file.
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdecimal() and int(columns) else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


def is_terminal() -> bool:
    """Whether results go to a terminal."""
    return sys.stdout.isatty()


def printable(text: str) -> str:
    """Text without characters that do something instead of showing something."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def cell(value: object, style: str = "") -> Text:
    """A table's cell; never read as markup."""
    return Text(printable(str(value)), style=style)


def show(renderable: RenderableType) -> None:
    """Write a result for people."""
    console = stdout_console()
    if console.is_terminal:
        console.print(renderable, soft_wrap=isinstance(renderable, str | Text))
        return
    with console.capture() as captured:
        console.print(renderable, soft_wrap=True)
    # Tables are filled up with blanks to their full width, which nobody wants in a file.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def say(text: str, style: str = "") -> None:
    """Tell people something beside the result."""
    console = stderr_console()
    console.print(Text(printable(text), style=style if console.is_terminal else ""), soft_wrap=True)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """`with progress_bar("removing", 1000) as done: done(100)`: `done` takes how many there are by now, in all."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, completed=count)


def write_json(value: Any) -> None:
    """One JSON document, the only thing on stdout."""
    from tampu.cli.payloads import jsonable  # loads the wire format, which `tampu --help` can do without

    sys.stdout.write(json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n")


def write_json_line(value: Any) -> None:
    """One line of a stream of JSON documents, at once."""
    from tampu.cli.payloads import jsonable

    sys.stdout.write(json.dumps(jsonable(value), allow_nan=False, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def write_line(text: str) -> None:
    """One line of a stream of lines, at once."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


async def while_read(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends, or until the reader of our output has gone: there may be nothing to write for long."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_reader_is_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        result, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(result, Exception):
        raise result


async def _reader_is_gone() -> None:
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # no file at all, or a system without poll
        await asyncio.Event().wait()
        return
    gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
    while not any(state & gone for _, state in poll.poll(0)):  # noqa: ASYNC110 - the kernel tells only who asks
        await asyncio.sleep(READER_CHECK_SECS)
