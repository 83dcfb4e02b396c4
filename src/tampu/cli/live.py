"""Shows something again and again: a live view in a terminal, a line a round in a pipe, JSON lines for programs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.live import Live

from tampu.cli.exits import TERMINATED
from tampu.cli.output import is_terminal, reader_is_gone, stdout_console, write_json_line, write_line
from tampu.cli.session import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rich.console import RenderableType

T = TypeVar("T")


def run_live(
    rounds: AsyncIterator[T],
    *,
    view: Callable[[T], RenderableType],
    lines: Callable[[T], list[str]],
    to_json: Callable[[T], Any],
    as_json: bool,
) -> None:
    """Show each round as it comes. Ctrl-C is the way to end it, and no error."""
    with contextlib.suppress(KeyboardInterrupt):
        run(_until_over(_show(rounds, view, lines, to_json, as_json)))


async def _until_over(work: Any) -> None:
    loop = asyncio.get_running_loop()
    showing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(reader_is_gone())
    is_terminated = False

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        showing.cancel()

    # The terminal is given back as it was, whatever ends the view.
    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        await asyncio.wait([showing, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        showing.cancel()
        results = await asyncio.gather(showing, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGTERM)
    if is_terminated:
        raise typer.Exit(TERMINATED)
    if isinstance(results[0], Exception):
        raise results[0]


async def _show(
    rounds: AsyncIterator[T],
    view: Callable[[T], RenderableType],
    lines: Callable[[T], list[str]],
    to_json: Callable[[T], Any],
    as_json: bool,
) -> None:
    if as_json:
        async for one in rounds:
            write_json_line(to_json(one))
    elif not is_terminal():
        async for one in rounds:
            for line in lines(one):
                write_line(line)
    else:
        with Live(console=stdout_console(), screen=True, auto_refresh=False) as live:
            async for one in rounds:
                live.update(view(one), refresh=True)
