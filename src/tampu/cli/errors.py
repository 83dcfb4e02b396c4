"""The end of a command: its exit code, and its error as one line.

| code | meaning |
|---|---|
| 0 | success; also when the reader of the output closed the pipe |
| 1 | error: no server, no such queue, a job that had to be abandoned |
| 2 | usage: an invalid argument or option |
| 3 | a threshold was exceeded, or `doctor` found a problem |
| 130, 143 | ended by Ctrl-C, by SIGTERM |
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tampu.base.checks import one_line
from tampu.errors import ConfigError, Error

if TYPE_CHECKING:
    from collections.abc import Sequence

OK = 0
ERROR = 1
USAGE = 2
BREACHED = 3
INTERRUPTED = 130
TERMINATED = 143

#: Set this environment variable to any value to print the traceback of an error.
TRACEBACK_VARIABLE = "TAMPU_TRACEBACK"


class CliError(Exception):
    """A command failed; the text is the one line shown to the user."""

    exit_code = ERROR


class UsageError(CliError):
    """A command was called with an invalid argument or option."""

    exit_code = USAGE


def check_choice(option: str, value: str | None, allowed: Sequence[str]) -> None:
    """Raise `UsageError` if the value is not allowed. None means that the option was not given."""
    if value is not None and value not in allowed:
        raise UsageError(f"{option} must be one of {', '.join(allowed)}; got {value!r}")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error that ended a command."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, ConfigError):
        return USAGE
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else ERROR


def line_of(error: BaseException) -> str:
    """Return an error as one line."""
    from tampu.redis.faults import Unreachable

    text = one_line(error)
    if isinstance(error, Unreachable):
        return f"{text}; check that a server is running there, or set --url or TAMPU_URL"
    if isinstance(error, Error | CliError | OSError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    report = f"internal error (please report it): {type(error).__name__}: {text}"
    return f"{report}; set {TRACEBACK_VARIABLE}=1 for a traceback"


def wants_traceback() -> bool:
    """Return whether errors are printed with their traceback."""
    return bool(os.environ.get(TRACEBACK_VARIABLE))
