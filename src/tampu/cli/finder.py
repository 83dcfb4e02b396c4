"""Finds the queues on a server: there is no list of them, so their keys are looked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.errors import ConfigError
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tampu.redis.pipe import Pipe

#: The keys that make a queue end in one of these letters; results and indexes of ULIDs do not, so that of a million
#: results none is sent to us.
PATTERN = "{chasqui:*}:*[mdqst]"
_KEY = re.compile(rb"\{chasqui:(?P<name>.*)\}:(?:stream|delayed|dlq|events|repeat|paused)", re.DOTALL)
#: Keys the server looks at in one step.
SCAN_COUNT = 2000


@dataclass(frozen=True, slots=True)
class FoundQueues:
    """Names in order; `unusable` are those that no client of ours can open: not UTF-8, or with braces."""

    names: list[str]
    unusable: list[bytes]


async def find_queues(pipes: Sequence[Pipe]) -> FoundQueues:
    """The queues on these servers."""
    raw: set[bytes] = set()
    for pipe in pipes:
        async for key in scan_keys(pipe, PATTERN):
            if found := _KEY.fullmatch(key):
                raw.add(found["name"])
    names: list[str] = []
    unusable: list[bytes] = []
    for name in sorted(raw):
        try:
            names.append(QueueKeys(name.decode()).queue_name)
        except (UnicodeDecodeError, ConfigError):
            unusable.append(name)
    return FoundQueues(names, unusable)


async def scan_keys(pipe: Pipe, pattern: str | bytes) -> AsyncIterator[bytes]:
    """All keys of a server that match, in no order; one that moves meanwhile may come twice."""
    cursor = b"0"
    while True:
        cursor, keys = await pipe.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        for key in keys:
            yield key
        if cursor == b"0":
            return
