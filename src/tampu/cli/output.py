"""Output of commands: results on stdout as tables, lines or JSON; messages, prompts and logs on stderr.

Everything that comes from a server is made printable first: a queue name or an error text may contain control
characters or markup that would affect the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import shlex
import sys
import traceback
from typing import TYPE_CHECKING, Any

from tampu.cli.units import time_of_day
from tampu.consume.context import job_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rich.console import Console, RenderableType
    from rich.text import Text

#: Width of tables written to a pipe or a file, in columns: wide enough that nothing is cut off.
PIPE_WIDTH = 240
#: How often to check whether the reader of a pipe has gone, in seconds.
READER_CHECK_SECS = 0.2
#: Formats and levels of logs.
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
#: Attributes that every log record has; all others are its `extra` fields.
_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))


def use_lenient_streams() -> None:
    """Replace characters that the terminal cannot show, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream was replaced or closed
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def console_of(stream: Any) -> Console:
    """Return the console for results (stdout), or for messages, prompts, progress bars and errors (stderr)."""
    from rich.console import Console  # here, as below: `tampu worker` prints nothing, and starts faster without rich

    # A pipe has no width; tables written to it are read with `less -S` or from a file.
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdecimal() and int(columns) else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


def is_terminal() -> bool:
    """Return whether results go to a terminal."""
    return sys.stdout.isatty()


def command(*words: str) -> str:
    """Return a `tampu` command to suggest, quoted for a shell: a queue's name may be chosen to run another one."""
    return f"`tampu {shlex.join(words)}`"


def printable(text: str) -> str:
    """Return the text with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def cell(value: object, style: str = "") -> Text:
    """Return a table cell, with its text never parsed as markup."""
    from rich.text import Text

    return Text(printable(str(value)), style=style)


def show(renderable: RenderableType) -> None:
    """Print a result as text. Control characters in plain text are escaped, except for line breaks."""
    if isinstance(renderable, str):
        renderable = "\n".join(map(printable, renderable.split("\n")))
    console = console_of(sys.stdout)
    if console.is_terminal:
        from rich.text import Text

        console.print(renderable, soft_wrap=isinstance(renderable, str | Text))
        return
    with console.capture() as captured:
        console.print(renderable, soft_wrap=True)
    # Rich pads tables to their full width; a file should have no trailing blanks.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def say(text: str, style: str = "") -> None:
    """Print a message on stderr."""
    from rich.text import Text

    console = console_of(sys.stderr)
    console.print(Text(printable(text), style=style if console.is_terminal else ""), soft_wrap=True)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar: `with progress_bar("removing", 1000) as done: done(100)`. `done` takes the total so far."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = console_of(sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, completed=count)


def write_json(value: Any, **layout: Any) -> None:
    """Write one JSON document. It must be the only output on stdout."""
    from tampu.inspect.views import jsonable  # loads the wire format, which `tampu --help` does not need

    sys.stdout.write(json.dumps(jsonable(value), allow_nan=False, **(layout or {"indent": 2})) + "\n")


def write_json_line(value: Any) -> None:
    """Write one line of a JSON Lines stream and flush it."""
    write_json(value, separators=(",", ":"))
    sys.stdout.flush()


def write_line(text: str) -> None:
    """Write one line of text and flush it."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


async def while_read(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the reader of our output is gone: it may have nothing to write for a long time."""
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
    except (OSError, ValueError, AttributeError):  # stdout is not a file, or the system has no poll()
        await asyncio.Event().wait()
        return
    gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
    while not any(state & gone for _, state in poll.poll(0)):  # noqa: ASYNC110 - the kernel sends no notification
        await asyncio.sleep(READER_CHECK_SECS)


# --- logs of long-running commands: text lines, or one JSON object per line


def set_up_logs(log_format: str, level: str, role: str) -> None:
    """Send all logs of this process to stderr. `role` names the process, for example `worker` or `worker-2`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role, as_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # if stderr is closed, there is nowhere to report it
    logging.captureWarnings(True)


def silence_py4j() -> None:
    """Silence the logs of the bridge to Java: a signal interrupts its calls, which is not an error."""
    for name in ("py4j", "py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def fields(**values: object) -> dict[str, object]:
    """Return extra fields for a JSON log line: `logger.info("...", extra=fields(job_id=...))`."""
    return {"fields": values}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """Return what a record has beyond its text: the job that wrote it, and its `extra` fields."""
    if record.name.startswith("tampu."):  # tampu's own lines say which job they are about
        return dict(getattr(record, "fields", {}))
    return job_fields() | {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _traceback(record: logging.LogRecord) -> str:
    if record.exc_info and record.exc_info[1] is not None:
        return "".join(traceback.format_exception(*record.exc_info))
    return record.exc_text or ""  # of a record from another process


class _Formatter(logging.Formatter):
    def __init__(self, role: str, *, as_json: bool) -> None:
        super().__init__()
        self._role = role
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        return self._json(record) if self._as_json else self._text(record)

    def _text(self, record: logging.LogRecord) -> str:
        line = f"{time_of_day(record.created * 1000)} {record.levelname.lower():<7} {self._role}[{record.process}] "
        line += printable(record.getMessage())
        if not record.name.startswith("tampu."):
            line += "".join(f" {name}={printable(str(value))}" for name, value in _extra(record).items())
        trace = _traceback(record).rstrip()
        return "\n".join([line, *map(printable, trace.split("\n"))]) if trace else line

    def _json(self, record: logging.LogRecord) -> str:
        from tampu.inspect.views import iso, jsonable  # loads the wire format, which a supervisor does not need

        values: dict[str, object] = {
            "ts": iso(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "role": self._role,
            "pid": record.process,
        }
        values = values | _extra(record) | values  # `extra` cannot replace them
        if trace := _traceback(record):
            values["traceback"] = trace
        return json.dumps(jsonable(values), allow_nan=False)
