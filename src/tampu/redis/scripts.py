"""The Lua scripts, one file each under `lua/`. Loaded once per connection and called by their SHA."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from tampu.redis.connection import pack_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Part


class Script:
    """One script's text and the bytes that load and call it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def packed_load(self) -> bytes:
        """The command that loads it."""
        return pack_command(("SCRIPT", "LOAD", self.text))

    def packed_call(self, keys: Sequence[bytes | str], args: Sequence[Part]) -> bytes:
        """The command that runs it."""
        return pack_command(("EVALSHA", self.sha, len(keys), *keys, *args))


@cache
def load_script(name: str) -> Script:
    """The script in `lua/<name>.lua`."""
    return Script(name, (files("tampu.redis") / "lua" / f"{name}.lua").read_text())
