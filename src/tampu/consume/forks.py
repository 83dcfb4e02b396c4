"""Ends the processes that handlers fork, once they leave the handler.

The child of a fork is a copy of the worker: a `sys.exit` in it would only fail the job there, and the copy would go on
as a second worker under the same name, on the same sockets and event loop.
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
    """Knows whether this process is a fork of the one that made the guard.

    An attribute that the fork sets: asking for the process id would be a system call for every job.
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
                # A handler that awaits something in the child gets back to the worker's loop without leaving.
                self._loop.call_soon(leave, RuntimeError("a forked process cannot use the worker's event loop"))


def leave(error: BaseException | None) -> NoReturn:
    """End the process as Python would after `error`, but without cleaning up what belongs to its parent."""
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
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code & 0xFF)


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        guard._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
