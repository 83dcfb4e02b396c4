"""What the shell offers when Tab is pressed. It never complains: an unreachable server offers nothing."""

from __future__ import annotations

from tampu.errors import Error

#: Nobody waits longer for a Tab.
TIMEOUT_SECS = 1.0


def complete_queue(incomplete: str) -> list[str]:
    """The names of queues that begin like this."""
    from tampu.cli.session import Session, run

    async def names() -> list[str]:
        async with Session(None, TIMEOUT_SECS) as session:
            return (await session.find_queues()).names

    try:
        return [name for name in run(names()) if name.startswith(incomplete)]
    except (Error, OSError):
        return []
