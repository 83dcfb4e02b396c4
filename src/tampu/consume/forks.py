"""Ends a process that a handler has forked as soon as it returns from the handler.

The child of a fork is a copy of the worker: `sys.exit` in it would only fail the job there, and the copy would continue
as a second worker with the same name, sockets and event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
import weakref
from typing import NoReturn


class ForkGuard:
    """Detects that this process is a fork of the one that made the guard.

    The fork sets an attribute: `os.getpid()` would be a system call for every job.
    """

    def __init__(self) -> None:
        self.is_child = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        _guards.add(self)

    def _after_fork_in_child(self) -> None:
        self.is_child = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed
                # A handler that awaits in the child returns to the worker's loop without leaving the handler.
                self._loop.call_soon(leave, RuntimeError("a forked process cannot use the worker's event loop"))


def leave(error: BaseException | None) -> NoReturn:
    """End the process as Python would after `error`, but leave the parent's resources alone."""
    code = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            code = error.code
        elif error.code is not None:
            sys.stderr.write(f"{error.code}\n")
            code = 1
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(code & 0xFF)


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        guard._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
