"""Options that many commands share, each defined once: flag, environment variable, help."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Annotated

import typer

from tampu.cli.errors import UsageError
from tampu.cli.output import printable, say
from tampu.errors import Error

#: How long shell completion waits for the server, in seconds.
COMPLETION_TIMEOUT_SECS = 1.0
#: Names that shell completion offers. A shell may expand what is completed, and anyone who can write to the server
#: chooses the names of queues: `$(reboot)` would be run.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.:@/+-]+")


def complete_queue(incomplete: str) -> list[str]:
    """Return the names of queues that start with `incomplete`; none if the server cannot be reached.

    Names with other characters than letters, digits and `_.:@/+-` are left out.
    """
    from tampu.cli.session import CommonOptions, Session

    try:
        found = CommonOptions(timeout=COMPLETION_TIMEOUT_SECS).run(Session.find_queues)
        return [name for name in found.names if name.startswith(incomplete) and _SAFE_NAME.fullmatch(name)]
    except (Error, OSError):
        return []


Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="TAMPU_URL",
        show_default="redis://127.0.0.1:6379",
        metavar="URL",
        help="Server URL: redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// or embedded:///path.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", envvar="TAMPU_TIMEOUT", min=0.1, metavar="SECONDS", help="How long to wait for the server."
    ),
]
DEFAULT_TIMEOUT_SECS = 3.0

AsJson = Annotated[bool, typer.Option("--json", envvar="TAMPU_JSON", help="Print JSON.")]
Raw = Annotated[bool, typer.Option("--raw", envvar="TAMPU_RAW", help="Show payloads as undecoded bytes.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be affected, and change nothing.")]

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Queue name.", autocompletion=complete_queue)]
OptionalQueueName = Annotated[
    str | None, typer.Argument(metavar="QUEUE", help="Queue name. Default: all queues.", autocompletion=complete_queue)
]
#: `--queue`, with `help=...`.
queue_option = partial(typer.Option, "--queue", "-q", metavar="QUEUE", autocompletion=complete_queue)
QueueOption = Annotated[str | None, queue_option(help="The job's queue. Default: search all queues.")]
LogFormat = Annotated[str, typer.Option("--log", envvar="TAMPU_LOG", metavar="text|json", help="Log format.")]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level", envvar="TAMPU_LOG_LEVEL", metavar="LEVEL", help="Log level: debug, info, warning or error."
    ),
]


def confirm(question: str, count: int, *, yes: bool, dry_run: bool) -> bool:
    """Ask for confirmation of a destructive action and return whether to go ahead.

    `question` reads like "remove 12 dead letters from emails". With `yes` it is not asked; with `dry_run` it is only
    printed. Raise `UsageError` if there is no terminal to ask on.
    """
    if dry_run:
        say(f"would {question}")
        return False
    if count == 0:
        say("no matching jobs; nothing was changed")
        return False
    if yes:
        say(f"{question} ...")
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"would {question}; not a terminal, so pass --yes to confirm or --dry-run to only print this")
    if not typer.confirm(f"{printable(question)}?", err=True):
        say("nothing was changed")
        return False
    return True
