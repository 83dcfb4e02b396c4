"""Load the Lua scripts from `lua/`, one file each; their reply codes, and which commands a server supports.

A script is sent once per connection and called by its SHA.

A line `--@include lib/name.lua` is replaced by that file, joined into one line, so that line numbers in the server's
errors match the script's file. Therefore comments in `lib/` must be on their own lines; they are removed.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from tampu.redis.connection import pack_command
from tampu.redis.faults import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Connection, Part, Reply

LUA = files("tampu.redis") / "lua"
_INCLUDE = "--@include "


class Script:
    """The text and the SHA of one script."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def packed_call(self, keys: Sequence[bytes | str], args: Sequence[Part]) -> bytes:
        """Return the packed command that calls the script."""
        return pack_command(("EVALSHA", self.sha, len(keys), *keys, *args))


@cache
def load_script(name: str) -> Script:
    """Return the script in `lua/<name>.lua`, with its includes resolved."""
    lines = (LUA / f"{name}.lua").read_text().splitlines()
    return Script(name, "\n".join(map(_resolved, lines)) + "\n")


def _resolved(line: str) -> str:
    if not line.lstrip().startswith(_INCLUDE):
        return line
    included = (LUA / line.split()[1]).read_text().splitlines()
    return " ".join(text.strip() for text in included if not text.lstrip().startswith("--"))


class AddCode(StrEnum):
    """The add script's result for one job."""

    ADDED = "a"
    DUPLICATE = "d"
    #: Not added: the queue is full.
    FULL = "f"
    #: The server rejected it; the error of the window says why.
    ERROR = "e"
    #: Set by the client, not by the script: it is not known whether the job was added; see the error of the window.
    UNKNOWN = "u"


class OutcomeKind(bytes, Enum):
    """The outcomes besides success, as the settle script knows them."""

    RETRY = b"t"
    DEAD_LETTER = b"x"
    CANCELLED = b"c"


class SettleCode(StrEnum):
    """The settle script's result for one outcome."""

    #: Written and acknowledged.
    WRITTEN = "k"
    #: Not written: the entry now belongs to another consumer.
    LOST = "l"
    #: Could not be written; the worker keeps the outcome and sends it again later.
    HELD = "h"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Commands and options that not every server supports."""

    #: XACKDEL: acknowledge and delete in one command (Redis 8.2).
    xackdel: bool
    #: XREADGROUP ... CLAIM: a read also returns idle entries of other consumers (Redis 8.4).
    read_claim: bool
    #: Scripts may declare `flags=allow-oom` (Redis 7.0).
    script_flags: bool
    #: Fields that are False because the user may not run the command: the server may support it.
    denied: frozenset[str] = frozenset()


async def probe_capabilities(connection: Connection, routing_key: str) -> Capabilities:
    """Try each capability on a missing key in the queue's slot; nothing is written."""
    probe = f"{routing_key}:probe"
    attempts: list[tuple[Part, ...]] = [
        ("XACKDEL", probe, "probe", "IDS", 1, "0-1"),
        ("XREADGROUP", "GROUP", "probe", "probe", "COUNT", 1, "CLAIM", 1000, "STREAMS", probe, ">"),
        ("EVAL", "#!lua flags=allow-oom\nreturn 1", 0),
    ]
    replies = await asyncio.gather(*(connection.ask(*parts) for parts in attempts), return_exceptions=True)
    tried = dict(zip(("xackdel", "read_claim", "script_flags"), replies, strict=True))
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
