"""How a command ends: its exit code, and what went wrong in one line.

| code | meaning |
|---|---|
| 0 | done; also when the reader of a pipe has seen enough |
| 1 | an error: no server, no such queue, a handler that had to be abandoned |
| 2 | usage: an argument or an option that cannot be |
| 3 | a threshold was breached, or `doctor` found something wrong |
| 130, 143 | ended by Ctrl-C, by SIGTERM |
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tampu.errors import ConfigError, Error

if TYPE_CHECKING:
    from collections.abc import Sequence

OK = 0
ERROR = 1
USAGE = 2
BREACHED = 3
INTERRUPTED = 130
TERMINATED = 143

#: Set to anything to see the traceback of an error.
TRACEBACK_VARIABLE = "TAMPU_TRACEBACK"


class CliError(Exception):
    """A command cannot go on; the text is the one line people see."""

    exit_code = ERROR


class UsageError(CliError):
    """The command was called in a way that cannot be."""

    exit_code = USAGE


def check_choice(option: str, value: str | None, allowed: Sequence[str]) -> None:
    """Refuse a value that is not allowed; None is not given."""
    if value is not None and value not in allowed:
        raise UsageError(f"{option} must be one of {', '.join(allowed)}; got {value!r}")


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that ended a command."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return ERROR


def line_of(error: BaseException) -> str:
    """An error in one line."""
    from redis.exceptions import RedisError as RedisPyError  # a command that went well need not load it

    from tampu.redis.faults import Unreachable

    text = " ".join(str(error).split())
    if isinstance(error, Unreachable):
        return f"{text}; is a server running there? --url or TAMPU_URL says where to look"
    if isinstance(error, Error | CliError):
        return text
    if isinstance(error, RedisPyError):
        return f"the server could not be asked: {text}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError):
        return text
    return f"{type(error).__name__}: {text} (this is a fault of tampu; {TRACEBACK_VARIABLE}=1 shows where)"


def wants_traceback() -> bool:
    """Whether errors are shown with their traceback."""
    return bool(os.environ.get(TRACEBACK_VARIABLE))
