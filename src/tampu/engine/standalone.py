"""Runs a loop with a pipe of its own, for promoters and schedulers outside a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.redis.pipe import Pipe
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tampu.redis.scripts import Script
    from tampu.redis.settings import ConnectionSettings


async def run_standalone(
    settings: ConnectionSettings,
    queue_name: str,
    scripts: Sequence[Script],
    work: Callable[[Pipe], Awaitable[None]],
) -> None:
    """Open a pipe, which raises when there is no server at all, do the work, close the pipe."""
    pipe = Pipe(settings, QueueKeys(queue_name).tag.encode(), scripts)
    try:
        await pipe.up()
        await work(pipe)
    finally:
        await pipe.close()
