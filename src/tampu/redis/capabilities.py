"""Detect what a server supports, by trying commands on a key that does not exist. Versions are never compared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from tampu.redis.connection import Connection, Part, Reply


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Commands and options that not every server supports."""

    #: XACKDEL: acknowledge and delete in one command (Redis 8.2).
    xackdel: bool
    #: XREADGROUP ... CLAIM: a read also returns idle entries of other consumers (Redis 8.4).
    read_claim: bool
    #: XADD ... IDMP: the server remembers the ids of recent adds (Redis 8.6).
    xadd_idmp: bool
    #: Scripts may declare `flags=allow-oom` (Redis 7.0).
    script_flags: bool
    #: Fields that are False because the user may not run the command: the server may support it.
    denied: frozenset[str] = frozenset()


async def probe_capabilities(connection: Connection, routing_key: str, *, adds: bool = True) -> Capabilities:
    """Try each capability on a missing key in the queue's slot; nothing is written.

    `adds=False` skips XADD, which a server out of memory refuses whether it supports IDMP or not.
    """
    probe = f"{routing_key}:probe"
    attempts: list[tuple[Part, ...]] = [
        ("XACKDEL", probe, "probe", "IDS", 1, "0-1"),
        ("XREADGROUP", "GROUP", "probe", "probe", "COUNT", 1, "CLAIM", 1000, "STREAMS", probe, ">"),
        ("XADD", probe, "NOMKSTREAM", "IDMP", "probe", "probe", "*", "probe", "probe") if adds else ("ECHO",),
        ("EVAL", "#!lua flags=allow-oom\nreturn 1", 0),
    ]
    replies = await asyncio.gather(*(connection.ask(*parts) for parts in attempts), return_exceptions=True)
    tried = dict(zip(("xackdel", "read_claim", "xadd_idmp", "script_flags"), replies, strict=True))
    denied = {name for name, reply in tried.items() if isinstance(reply, ServerError) and reply.kind == "NOPERM"}
    return Capabilities(**{name: _is_known(reply) for name, reply in tried.items()}, denied=frozenset(denied))


def _is_known(reply: Reply) -> bool:
    if isinstance(reply, ServerError) and reply.kind in ("ERR", "NOPERM"):
        return False
    if isinstance(reply, ServerError) and reply.kind == "NOGROUP":
        return True  # the command is supported; only the group does not exist
    if isinstance(reply, BaseException):
        raise reply  # a replica, or a server out of memory: unknown for now
    return True
