"""Groups the newest dead letters by cause, and keeps the groups current by reading only new letters."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tampu.inspect.dead_letters import LetterCluster
from tampu.wire.dlq import DlqEntry, decode_dlq_fields
from tampu.wire.entry import entry_ms

if TYPE_CHECKING:
    from tampu.inspect.streams import Entry
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

PAGE = 500
#: Newest letters that are grouped; older ones are only counted.
MAX_LETTERS = 10_000
#: Longest time that one look may take, in seconds; the next one continues.
MAX_SECS = 0.25
#: Shortest time between two starts from the beginning, in seconds: a full stream of letters is trimmed all the time.
RESTART_SECS = 10.0
#: Groups that are kept: a name or an error type that varies must not fill the memory.
MAX_CLUSTERS = 500


@dataclass(kw_only=True, slots=True)
class Cause(LetterCluster):
    """A cluster of dead letters with their number by minute, in minutes since the epoch."""

    minutes: Counter[int] = field(default_factory=Counter)


class Causes:
    """The causes of one queue's newest dead letters."""

    def __init__(self, max_letters: float = MAX_LETTERS) -> None:
        self._max_letters = max_letters
        #: Letters in the queue.
        self.total = 0
        self._restarted_at = -RESTART_SECS
        self._forget()

    def _forget(self) -> None:
        self._by_key: dict[tuple[str, str], Cause] = {}
        self._oldest = "+"
        #: Letters that there should be, if none were removed.
        self._expected = 0
        #: ID of the newest letter that was read: bulk actions apply to letters up to here.
        self.newest = ""
        self.read = 0
        self.is_complete = False

    @property
    def all(self) -> list[Cause]:
        """The causes, the largest first."""
        return sorted(self._by_key.values(), key=lambda cause: (-cause.letters, cause.name, cause.cluster))

    async def look(self, client: Client, keys: QueueKeys) -> None:
        """Read what is new. If letters were removed, start again: the causes of those are not known."""
        new, self.total = await self._ask(client, keys, ("XRANGE", keys.dlq, f"({self.newest or '0-0'}", "+"))
        now = time.monotonic()
        is_shorter = self.total < self._expected + len(new)
        if not self.newest or len(new) == PAGE or (is_shorter and now - self._restarted_at >= RESTART_SECS):
            self._restarted_at = now
            self._forget()
            new, self.total = await self._ask(client, keys, ("XREVRANGE", keys.dlq, "+", "-"))
            self._expected = self.total
            self._take_older(new)
        else:
            self._expected += len(new)
            for entry_id, fields in new:
                self.newest = entry_id.decode()
                self._add(decode_dlq_fields(self.newest, fields), entry_ms(entry_id))
        deadline = now + MAX_SECS
        while not self.is_complete and self.read < self._max_letters and time.monotonic() < deadline:
            self._take_older(await client.call("XREVRANGE", keys.dlq, self._oldest, "-", "COUNT", PAGE))

    async def _ask(
        self, client: Client, keys: QueueKeys, command: tuple[str, str, str, str]
    ) -> tuple[list[Entry], int]:
        """Return a page of letters and, asked in the same request, their number."""
        found, total = await client.call_many([(*command, "COUNT", PAGE), ("XLEN", keys.dlq)])
        return found, int(total)

    def _take_older(self, entries: list[Entry]) -> None:
        for entry_id, fields in entries:
            self._oldest = f"({entry_id.decode()}"
            self.newest = self.newest or entry_id.decode()
            self._add(decode_dlq_fields(entry_id.decode(), fields), entry_ms(entry_id))
        self.is_complete = len(entries) < PAGE

    def _add(self, letter: DlqEntry, added_ms: int) -> None:
        self.read += 1
        cluster, at_ms = letter.cluster, letter.failed_at_ms or added_ms
        cause = self._by_key.get((letter.name, cluster))
        if cause is None:
            if len(self._by_key) >= MAX_CLUSTERS and self._max_letters == MAX_LETTERS:
                return
            cause = self._by_key[letter.name, cluster] = Cause(
                cluster=cluster,
                name=letter.name,
                reason=letter.reason,
                error_type=letter.error_type,
                fingerprint=letter.fingerprint,
                letters=0,
                first_seen_ms=at_ms,
                last_seen_ms=at_ms,
                sample=letter,
            )
        cause.letters += 1
        cause.first_seen_ms = min(cause.first_seen_ms, at_ms)
        if at_ms >= cause.last_seen_ms:
            cause.last_seen_ms, cause.sample = at_ms, letter
        cause.minutes[at_ms // 60_000] += 1
