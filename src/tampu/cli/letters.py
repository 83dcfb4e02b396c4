"""Dead letters for the command line: which are meant, how many, and how one is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tampu.cli.exits import UsageError
from tampu.cli.payloads import envelope_of, payload_of
from tampu.cli.session import server_now_ms
from tampu.cli.snapshot import entry_ms
from tampu.cli.units import iso
from tampu.engine.dead_letters import PAGE
from tampu.wire.dlq import DlqEntry, DlqReason, decode_dlq_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tampu.redis.pipe import Pipe
    from tampu.wire.keys import QueueKeys

#: What an id of the dlq stream looks like; every other id is a job's.
_LETTER_ID = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters are meant; what is None does not matter."""

    ids: tuple[str, ...] = ()
    reason: str | None = None
    name: str | None = None
    older_than_secs: float | None = None

    def __post_init__(self) -> None:
        known = [reason.value for reason in DlqReason]
        if self.reason is not None and self.reason not in known:
            raise UsageError(f"--reason must be one of {', '.join(known)}; got {self.reason!r}")

    @property
    def is_everything(self) -> bool:
        """Whether no letter is left out."""
        return self == Wanted()

    def filters(self) -> dict[str, Any]:
        """The same as arguments of `Producer.replay_dlq` and its kin; ids apart."""
        found = {"reason": self.reason, "name": self.name, "older_than": self.older_than_secs}
        return {name: value for name, value in found.items() if value is not None}

    def matches(self, letter: DlqEntry, before_ms: float) -> bool:
        """Whether a letter is meant."""
        return (
            (self.reason is None or letter.reason == self.reason)
            and (self.name is None or letter.name == self.name)
            and entry_ms(letter.dlq_id.encode()) <= before_ms
            and (not self.ids or letter.dlq_id in self.ids or job_id_of(letter) in self.ids)
        )


async def walk(pipe: Pipe, keys: QueueKeys, wanted: Wanted) -> AsyncIterator[DlqEntry]:
    """The letters that are meant, oldest first, in pages: there may be more than fit into memory."""
    if wanted.ids and all(_LETTER_ID.fullmatch(one) for one in wanted.ids):
        pages = [await pipe.call("XRANGE", keys.dlq, one, one) for one in wanted.ids]
        for entries in pages:
            for letter in _decoded(entries):
                if wanted.matches(letter, float("inf")):
                    yield letter
        return
    before_ms = float("inf")
    if wanted.older_than_secs is not None:
        before_ms = await server_now_ms(pipe) - wanted.older_than_secs * 1000
    start = "-"
    while True:
        entries = await pipe.call("XRANGE", keys.dlq, start, "+", "COUNT", PAGE)
        for letter in _decoded(entries):
            if wanted.matches(letter, before_ms):
                yield letter
        if len(entries) < PAGE:
            return
        start = "(" + entries[-1][0].decode()


async def count(pipe: Pipe, keys: QueueKeys, wanted: Wanted) -> int:
    """How many letters are meant."""
    if wanted.is_everything:
        return int(await pipe.call("XLEN", keys.dlq))
    found = 0
    async for _ in walk(pipe, keys, wanted):
        found += 1
    return found


async def letter_ids(pipe: Pipe, keys: QueueKeys, wanted: Wanted) -> list[str]:
    """The ids in the dlq stream of the letters that `wanted.ids` name, by their own ids or by their jobs'."""
    return [letter.dlq_id async for letter in walk(pipe, keys, wanted)]


def _decoded(entries: list[tuple[bytes, list[bytes]]]) -> list[DlqEntry]:
    return [decode_dlq_fields(entry_id.decode(), fields) for entry_id, fields in entries]


def job_id_of(letter: DlqEntry) -> str | None:
    """The id of the job in a letter; None when its envelope cannot be read."""
    job = envelope_of(letter.payload)
    return None if job is None else job.id


def to_json(letter: DlqEntry, *, raw: bool) -> dict[str, Any]:
    """A letter for programs. `payload` is what the job was given; None when the envelope cannot be read."""
    job = envelope_of(letter.payload, letter.name)
    return {
        "dlq_id": letter.dlq_id,
        "job_id": None if job is None else job.id,
        "name": letter.name,
        "reason": letter.reason,
        "detail": letter.detail,
        "error_type": letter.error_type,
        "error": letter.error,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "died_at": iso(letter.failed_at_ms or entry_ms(letter.dlq_id.encode())),
        "created_at": None if job is None else iso(job.created_at_ms),
        "source_id": letter.source_id,
        "payload": None if job is None else payload_of(job, raw=raw),
        "envelope": letter.payload if job is None else None,
        "original": letter.original,
        "traceback": letter.traceback,
    }
