"""What a server can do: tried out on a key that does not exist, never guessed from its version."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from tampu.redis.connection import Connection, Part, Reply


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Commands and forms that not every server knows."""

    #: XACKDEL: acknowledge and delete in one command (Redis 8.2).
    xackdel: bool
    #: XREADGROUP ... CLAIM: idle entries of others come with the read (Redis 8.4).
    read_claim: bool
    #: XADD ... IDMP: the server remembers ids of recent adds (Redis 8.6).
    xadd_idmp: bool
    #: Scripts may say `flags=allow-oom` (Redis 7.0).
    script_flags: bool


async def probe_capabilities(connection: Connection, routing_key: str, *, adds: bool = True) -> Capabilities:
    """Try each on a key of the queue's slot that is not there; nothing is written.

    Whoever adds nothing need not try XADD, about which a server without memory cannot tell.
    """
    probe = f"{routing_key}:probe"
    attempts: list[tuple[Part, ...]] = [
        ("XACKDEL", probe, "probe", "IDS", 1, "0-1"),
        ("XREADGROUP", "GROUP", "probe", "probe", "COUNT", 1, "CLAIM", 1000, "STREAMS", probe, ">"),
        ("XADD", probe, "NOMKSTREAM", "IDMP", "probe", "probe", "*", "probe", "probe") if adds else ("ECHO",),
        ("EVAL", "#!lua flags=allow-oom\nreturn 1", 0),
    ]
    replies = await asyncio.gather(*(connection.ask(*parts) for parts in attempts), return_exceptions=True)
    return Capabilities(*(_is_known(reply) for reply in replies))


def _is_known(reply: Reply) -> bool:
    if isinstance(reply, ServerError) and reply.kind in ("ERR", "NOPERM"):
        return False
    if isinstance(reply, ServerError) and reply.kind == "NOGROUP":
        return True  # understood, only that the group is not there
    if isinstance(reply, BaseException):
        raise reply  # a replica, or a server without memory: it cannot tell now
    return True
