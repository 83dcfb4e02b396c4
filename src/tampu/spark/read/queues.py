"""Finds the queues that option `subscribePattern` matches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tampu.errors import ConfigError
from tampu.redis.settings import parse_url
from tampu.spark.server import QueueServer
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from tampu.spark.options import ReadOptions

#: Keys that a queue consists of, by their last letter, so that the server does not send the keys of results.
_MATCH = "{chasqui:*}:*[mdqst]"
_KEY = re.compile(rb"\{chasqui:(?P<name>.*)\}:(?:stream|delayed|dlq|events|repeat)", re.DOTALL)
#: Keys that the server looks at in one step.
SCAN_COUNT = 2_000


def check_can_scan(url: str) -> None:
    """Raise `ConfigError` if the keys of a server cannot be listed in one place."""
    if parse_url(url).kind == "cluster":
        raise ConfigError("option subscribePattern does not work with a Cluster: name the queues with option queue")


def queues_of(options: ReadOptions) -> tuple[str, ...]:
    """Return the queues of a read: those that were named, or those that match now, in order."""
    if options.queue_pattern is None:
        return options.queues
    pattern = re.compile(options.queue_pattern)
    names: set[str] = set()
    with QueueServer(options.url, "default") as server:
        cursor = b"0"
        while True:
            cursor, keys = server.call("SCAN", cursor, "MATCH", _MATCH, "COUNT", SCAN_COUNT)
            for key in keys:
                found = _KEY.fullmatch(key)
                name = found["name"].decode(errors="replace") if found else ""
                if found and pattern.fullmatch(name) and _is_usable(name):
                    names.add(name)
            if cursor == b"0":
                return tuple(sorted(names))


def _is_usable(name: str) -> bool:
    try:
        QueueKeys(name)
    except ConfigError:
        return False
    return True
