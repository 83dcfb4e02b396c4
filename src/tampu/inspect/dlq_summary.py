"""Groups dead letters by what they have in common: queue operators see ten causes, not ten thousand letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tampu.inspect.snapshot import entry_ms
from tampu.wire.dlq import decode_dlq_fields
from tampu.wire.fingerprint import cluster_id, fingerprint

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.dlq import DlqEntry
    from tampu.wire.keys import QueueKeys

#: Letters read in one step.
PAGE = 500


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


async def summarize_letters(client: Client, keys: QueueKeys) -> list[LetterCluster]:
    """Return all clusters of a queue's dead letters, the largest first. The stream is read in steps."""
    clusters: dict[tuple[str, str], LetterCluster] = {}
    position = "-"
    while True:
        entries = await client.call("XRANGE", keys.dlq, position, "+", "COUNT", PAGE)
        for entry_id, fields in entries:
            letter = decode_dlq_fields(entry_id.decode(), fields)
            shape = fingerprint(letter.error if letter.error is not None else letter.detail)
            cluster = cluster_id(letter.reason, letter.error_type, shape)
            at_ms = letter.failed_at_ms or entry_ms(entry_id)
            known = clusters.get((letter.name, cluster))
            if known is None:
                clusters[letter.name, cluster] = LetterCluster(
                    cluster=cluster,
                    name=letter.name,
                    reason=letter.reason,
                    error_type=letter.error_type,
                    fingerprint=shape,
                    letters=1,
                    first_seen_ms=at_ms,
                    last_seen_ms=at_ms,
                    sample=letter,
                )
                continue
            known.letters += 1
            known.first_seen_ms = min(known.first_seen_ms, at_ms)
            known.last_seen_ms = max(known.last_seen_ms, at_ms)
            known.sample = letter
        if len(entries) < PAGE:
            return sorted(clusters.values(), key=lambda one: (-one.letters, one.name, one.cluster))
        position = f"({entries[-1][0].decode()}"
