"""Replaces what traces this process for a while: coverage, which traces it otherwise, must get all of it back."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def traced_by(trace: Callable[..., Any] | None) -> Iterator[None]:
    """Let `trace` trace this thread and those started meanwhile (None: nothing does), then what did so before."""
    earlier, earlier_of_threads = sys.gettrace(), threading.gettrace()
    threading.settrace(trace)  # type: ignore[arg-type]  # None is allowed, as for sys.settrace
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)
        threading.settrace(earlier_of_threads)  # type: ignore[arg-type]
