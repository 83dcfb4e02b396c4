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
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
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


def table(*columns: str, title: str | None = None, numbers: tuple[str, ...] = ()) -> Table:
    """A table in the one style; columns named in `numbers` stand to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return made


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


async def reader_is_gone() -> None:
    """Returns when nobody reads our output any more. A write would tell, but there may be nothing to write for long."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # no file at all, or a system without poll
        await asyncio.Event().wait()
        return
    gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
    while not any(state & gone for _, state in poll.poll(0)):  # noqa: ASYNC110 - the kernel tells only who asks
        await asyncio.sleep(READER_CHECK_SECS)
