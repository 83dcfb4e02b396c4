"""Loads the Lua scripts, one file each under `lua/`: sent once per connection, and called by their SHA.

A line `--@include lib/name.lua` stands for what that file defines. It becomes one line, so that the line number in a
server's error is the line of the script's file. In the files of `lib/` a comment has its line to itself.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from tampu.redis.connection import pack_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Part

LUA = files("tampu.redis") / "lua"
_INCLUDE = "--@include "


class Script:
    """One script's text and the bytes that load and call it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def packed_call(self, keys: Sequence[bytes | str], args: Sequence[Part]) -> bytes:
        """The command that runs it."""
        return pack_command(("EVALSHA", self.sha, len(keys), *keys, *args))


@cache
def load_script(name: str) -> Script:
    """Return the script in `lua/<name>.lua`, with what it includes."""
    lines = (LUA / f"{name}.lua").read_text().splitlines()
    return Script(name, "\n".join(map(_resolved, lines)) + "\n")


def _resolved(line: str) -> str:
    if not line.lstrip().startswith(_INCLUDE):
        return line
    included = (LUA / line.split()[1]).read_text().splitlines()
    return " ".join(text.strip() for text in included if not text.lstrip().startswith("--"))
