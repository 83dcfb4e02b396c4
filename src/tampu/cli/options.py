"""Options that many commands share, each defined once: flag, environment variable, help."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from tampu.cli.errors import UsageError, check_choice
from tampu.cli.output import FORMATS, LEVELS, printable, say
from tampu.cli.units import parse_duration
from tampu.errors import Error

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    Option(
        "--url",
        envvar="TAMPU_URL",
        show_default="redis://127.0.0.1:6379",
        metavar="URL",
        help="Server URL: redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// or embedded:///path.",
    ),
]
Timeout = Annotated[
    float,
    Option("--timeout", envvar="TAMPU_TIMEOUT", min=0.1, metavar="SECONDS", help="How long to wait for the server."),
]
DEFAULT_TIMEOUT_SECS = 3.0

#: An option that takes `90s` or `15m` and whose value is in seconds.
duration_option = partial(Option, metavar="DURATION", parser=parse_duration)


def choice_option(allowed: Sequence[str], *flags: str, metavar: str | None = None, **settings: Any) -> Any:
    """Return an option that takes one of a few values."""

    def checked(value: str) -> str:
        check_choice(flags[0], value, allowed)
        return value

    return Option(*flags, metavar=metavar or "|".join(allowed), parser=checked, **settings)


AsJson = Annotated[bool, Option("--json", envvar="TAMPU_JSON", help="Print JSON.")]
Raw = Annotated[bool, Option("--raw", envvar="TAMPU_RAW", help="Show payloads as undecoded bytes.")]
JobName = Annotated[str | None, Option("--name", help="Only jobs with this name.")]

QueueName = Annotated[str, Argument(metavar="QUEUE", help="Queue name.", autocompletion=complete_queue)]
OptionalQueueName = Annotated[
    str | None, Argument(metavar="QUEUE", help="Queue name. Default: all queues.", autocompletion=complete_queue)
]
#: `--limit`, with `help=...`.
limit_option = partial(Option, "--limit", "-n", min=1)
#: `--queue`, with `help=...`.
queue_option = partial(Option, "--queue", "-q", metavar="QUEUE", autocompletion=complete_queue)
QueueOption = Annotated[str | None, queue_option(help="The job's queue. Default: search all queues.")]
LogFormat = Annotated[str, choice_option(FORMATS, "--log", envvar="TAMPU_LOG", help="Log format.")]
LogLevel = Annotated[
    str,
    choice_option(
        *(LEVELS, "--log-level"), metavar="LEVEL", envvar="TAMPU_LOG_LEVEL", help=f"Log level: {', '.join(LEVELS)}."
    ),
]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Options of commands that ask before a destructive action."""

    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be affected, and change nothing.")] = False

    def ask(self, question: str, count: int) -> bool:
        """Return whether to go ahead. `question` reads like "remove 12 dead letters from emails".

        With --dry-run it is only printed. Raise `UsageError` if there is no terminal to ask on.
        """
        if self.dry_run:
            say(f"would {question}")
            return False
        if count == 0:
            say("no matching jobs; nothing was changed")
            return False
        if self.yes:
            say(f"{question} ...")
            return True
        if not sys.stdin.isatty():
            how = "not a terminal, so pass --yes to confirm or --dry-run to only print this"
            raise UsageError(f"would {question}; {how}")
        if not typer.confirm(f"{printable(question)}?", err=True):
            say("nothing was changed")
            return False
        return True
