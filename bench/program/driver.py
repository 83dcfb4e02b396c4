"""The protocol of a contestant's program: JSON lines on stdin and stdout.

It first prints `{"name": ..., "versions": {...}, "settings": {...}, "scenarios": [...]}`. Then each input line asks for
one scenario, `{"scenario": "queue-add", "total": 1000}`, and is answered by its figures or by `{"error": "..."}`. The
runner empties the server before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import platform
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from bench.program import stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable


def serve(
    name: str,
    scenarios: dict[str, Callable[..., Any]],
    *,
    packages: tuple[str, ...],
    settings: dict[str, str],
) -> None:
    """Answer until stdin ends. A scenario gets the server's URL and `total`; it can be a coroutine function."""
    url, stopwatch.server_pid = sys.argv[1], int(sys.argv[2])
    # Output of libraries must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    answer({"name": name, "versions": _versions(packages), "settings": settings, "scenarios": [*scenarios]})
    for line in sys.stdin:
        request = json.loads(line)
        scenario = scenarios[request.pop("scenario")]
        try:
            answer(run(scenario, url, **request))
        except (Exception, asyncio.CancelledError) as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def run(scenario: Callable[..., Any], url: str, **arguments: Any) -> dict[str, float]:
    """Run one scenario, on a new event loop if it is a coroutine function."""
    if not inspect.iscoroutinefunction(scenario):
        return scenario(url, **arguments)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(scenario(url, **arguments))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (*packages, "redis", "hiredis", "uvloop"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
