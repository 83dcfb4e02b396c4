"""Options that many commands share, each said once: flag, environment variable, help.

Options that only one command has get their variable from its name: `tampu dlq peek --limit` is `TAMPU_DLQ_PEEK_LIMIT`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tampu.cli.errors import UsageError
from tampu.cli.output import printable, say
from tampu.errors import Error

#: How long a Tab waits for the server, in seconds.
COMPLETION_TIMEOUT_SECS = 1.0


def complete_queue(incomplete: str) -> list[str]:
    """Return the names of queues that start like this; none when the server cannot be reached."""
    from tampu.cli.session import CommonOptions, Session

    try:
        found = CommonOptions(timeout=COMPLETION_TIMEOUT_SECS).run(Session.find_queues)
        return [name for name in found.names if name.startswith(incomplete)]
    except (Error, OSError):
        return []


Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="TAMPU_URL",
        show_default="redis://127.0.0.1:6379",
        metavar="URL",
        help="The server: redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// or embedded:///path.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", envvar="TAMPU_TIMEOUT", min=0.1, metavar="SECONDS", help="How long to wait for the server."
    ),
]
DEFAULT_TIMEOUT_SECS = 3.0

AsJson = Annotated[bool, typer.Option("--json", envvar="TAMPU_JSON", help="Write JSON, for programs.")]
Raw = Annotated[bool, typer.Option("--raw", envvar="TAMPU_RAW", help="Show payloads as the bytes they are.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", envvar="TAMPU_YES", help="Do it without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", envvar="TAMPU_DRY_RUN", help="Only say how many it would touch.")]

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=complete_queue)]
OptionalQueueName = Annotated[
    str | None,
    typer.Argument(metavar="QUEUE", help="The queue's name; all queues without it.", autocompletion=complete_queue),
]
QueueOption = Annotated[
    str | None,
    typer.Option(
        "--queue",
        "-q",
        metavar="QUEUE",
        help="The job's queue; all are searched without it.",
        autocompletion=complete_queue,
    ),
]
LogFormat = Annotated[
    str, typer.Option("--log", envvar="TAMPU_LOG", metavar="text|json", help="Logs for people or for programs.")
]
LogLevel = Annotated[
    str,
    typer.Option("--log-level", envvar="TAMPU_LOG_LEVEL", metavar="LEVEL", help="debug, info, warning or error."),
]


def confirm(question: str, count: int, *, yes: bool, dry_run: bool) -> bool:
    """Return whether to go ahead with `question`, which reads like "remove 12 dead letters of emails".

    It is asked on a terminal unless `--yes` answers it; `--dry-run` only says it.
    """
    if dry_run:
        say(f"would {question}")
        return False
    if count == 0:
        say(f"nothing to do: would {question}")
        return False
    if yes:
        say(f"{question} ...")
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"would {question}: say --yes, as nobody can be asked here, or --dry-run")
    if not typer.confirm(f"{printable(question)}?", err=True):
        say("nothing was done")
        return False
    return True
