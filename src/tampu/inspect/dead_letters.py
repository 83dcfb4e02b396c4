"""The dead letters of a queue: filtered by ID, cluster, reason, name, error or age, and summarized."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from tampu.base.checks import check_delay_ms, check_text, invalid
from tampu.inspect.jobs import decoded_job
from tampu.inspect.streams import stream_pages
from tampu.wire.dlq import DlqEntry, DlqReason, decode_dlq_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import timedelta

    from tampu.inspect.streams import Entry
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

#: Letters read in one call.
PAGE = 200
#: How long the replay counts are kept after the last replay, in seconds.
REPLAY_COUNTS_TTL_SECS = 30 * 24 * 3600


class ReplayCount(int):
    """The number of letters moved. `skipped` counts letters with an unreadable envelope, which were left in place;
    `queue_is_full` is True if the replay stopped because the queue is full."""

    skipped: int = 0
    queue_is_full: bool = False


REASONS = tuple(reason.value for reason in DlqReason)
_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class DlqQuery(TypedDict, total=False):
    """Filters for dead letters. Without any, a call applies to all of them."""

    #: Only letters with these IDs.
    ids: Sequence[str] | None
    #: Only letters with this `DlqReason`, such as "retries_exhausted".
    reason: str | None
    #: Only jobs with this name.
    name: str | None
    #: Only letters with this type of error, such as "ConnectionError".
    error_type: str | None
    #: Only letters whose error contains this text, upper or lower case.
    match: str | None
    #: Only letters at least this old: a timedelta or seconds.
    older_than: timedelta | float | None
    #: Only letters at most this old: a timedelta or seconds.
    newer_than: timedelta | float | None
    #: Only letters of this cluster, as `dlq_summary` names it.
    cluster: str | None
    #: Take the newest letters first.
    newest: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DlqFilter:
    """A checked `DlqQuery`. A field that is None matches every letter."""

    #: They are read directly, in this order, whatever their age.
    ids: Sequence[str] | None = None
    #: IDs of letters or of the jobs in them; to find a job's, the whole stream is read.
    any_ids: Sequence[str] | None = None
    reason: str | None = None
    name: str | None = None
    error_type: str | None = None
    match: str | None = None
    #: By the server's clock.
    older_than_ms: int | None = None
    newer_than_ms: int | None = None
    cluster: str | None = None
    #: Only letters up to this ID: those that were there when an operator was asked.
    last_id: str | None = None
    #: It does not change which letters match.
    newest: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for dlq_id in self.ids or ():
            if isinstance(self.ids, str) or not isinstance(dlq_id, str) or not _ENTRY_ID.fullmatch(dlq_id):
                raise invalid("ids", self.ids, "a list of dead-letter IDs, such as ['1700000000000-0']")
        if self.last_id is not None and not _ENTRY_ID.fullmatch(self.last_id):
            raise invalid("last_id", self.last_id, "the ID of a dead letter")
        if self.reason is not None and self.reason not in REASONS:
            raise invalid("reason", self.reason, f"one of {', '.join(REASONS)}")
        for name in ("name", "error_type", "match", "cluster"):
            if (value := getattr(self, name)) is not None:
                check_text(name, value, blank_ok=True)

    @classmethod
    def of(cls, query: DlqQuery) -> DlqFilter:
        """Return the filter for a call's arguments. Raises `ConfigError` for a value that is not allowed."""
        for unknown in query.keys() - DlqQuery.__annotations__.keys():
            raise TypeError(f"unknown filter {unknown!r}; allowed: {', '.join(DlqQuery.__annotations__)}")
        given: dict[str, Any] = {**query}
        for age in ("older_than", "newer_than"):
            if (limit := given.pop(age, None)) is not None:
                given[f"{age}_ms"] = check_delay_ms(limit, age)
        return cls(**given)

    @classmethod
    def by_any_id(cls, ids: Sequence[str], **others: Any) -> DlqFilter:
        """Return a filter for IDs of letters or of jobs. It is fast if all of them look like IDs of letters."""
        if all(_ENTRY_ID.fullmatch(entry_id) for entry_id in ids):
            return cls(ids=ids or None, **others)
        return cls(any_ids=ids, **others)

    @property
    def compares(self) -> bool:
        """Return True if a letter must be read to know whether it matches."""
        compared = (self.reason, self.name, self.error_type, self.match, self.cluster, self.any_ids)
        return any(value is not None for value in compared)

    def matches(self, entry: DlqEntry) -> bool:
        """Return True if everything but the age matches."""
        return (
            (self.reason is None or entry.reason == self.reason)
            and (self.name is None or entry.name == self.name)
            and (self.error_type is None or entry.error_type == self.error_type)
            and (self.match is None or self.match.lower() in entry.error_text.lower())
            and (self.cluster is None or entry.cluster == self.cluster)
            and (self.any_ids is None or entry.dlq_id in self.any_ids or _job_id_of(entry) in self.any_ids)
        )


async def letter_pages(
    client: Client, keys: QueueKeys, query: DlqFilter, limit: float = math.inf, *, first_page: int = PAGE
) -> AsyncIterator[list[DlqEntry]]:
    """Yield up to `limit` matching letters, page by page. Letters of earlier pages may be moved or deleted meanwhile.

    A letter may be as large as its job, so the first page is no larger than `limit` and `first_page`.
    """
    if limit <= 0:
        return
    async for entries in _pages(client, keys, query, int(max(min(limit, first_page), 1))):
        letters = [letter for letter in map(_decoded, entries) if query.matches(letter)]
        yield letters if len(letters) <= limit else letters[: int(limit)]
        limit -= len(letters)
        if limit <= 0:
            return


async def _pages(client: Client, keys: QueueKeys, query: DlqFilter, first_page: int) -> AsyncIterator[list[Entry]]:
    if query.ids is not None:
        for dlq_id in query.ids:
            yield await client.call("XRANGE", keys.dlq, dlq_id, dlq_id)
        return
    now_ms = await client.server_time_ms()
    low = "-" if query.newer_than_ms is None else str(max(now_ms - query.newer_than_ms, 0))
    high = query.last_id or "+" if query.older_than_ms is None else str(max(now_ms - query.older_than_ms, 0))
    first_page = PAGE if query.compares else first_page
    pages = stream_pages(client, keys.dlq, low, high, newest_first=query.newest, page=PAGE, first_page=first_page)
    async for entries in pages:
        yield entries


def _decoded(entry: Entry) -> DlqEntry:
    return decode_dlq_fields(entry[0].decode(), entry[1])


def _job_id_of(letter: DlqEntry) -> str | None:
    job = decoded_job(letter.payload)
    return None if job is None else job.id


# --- clusters


@dataclass(kw_only=True, slots=True)
class LetterCluster:
    """Dead letters of one task with the same reason, error type and fingerprint."""

    #: Short name, the same as in the tables of the data pipeline.
    cluster: str
    name: str
    reason: str
    error_type: str | None
    #: The error's text with numbers, IDs and quoted values replaced.
    fingerprint: str
    letters: int
    first_seen_ms: int
    last_seen_ms: int
    #: The newest letter.
    sample: DlqEntry
