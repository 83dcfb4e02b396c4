"""Load the Lua scripts from `lua/`, one file each. A script is sent once per connection and called by its SHA.

A line `--@include lib/name.lua` is replaced by that file, joined into one line, so that line numbers in the server's
errors match the script's file. Therefore comments in `lib/` must be on their own lines; they are removed.
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
