"""Queues with known contents, written straight into the server."""

from __future__ import annotations

from typing import Any

from tampu.wire.dlq import DlqEntry, encode_dlq_fields
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.events import encode_event_fields
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import encode_slot

#: An instant in 2025, for everything that needs one.
T0 = 1_750_000_000_000


class Filled:
    """One server's queues."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.url: str = server.url
        self.client: Any = server.client()

    def keys(self, queue: str = "q") -> QueueKeys:
        return QueueKeys(queue)

    def xadd(self, key: str, *fields: Any, entry_id: str = "*", maxlen: int | None = None) -> bytes:
        trim = () if maxlen is None else ("MAXLEN", maxlen)
        return self.client.execute_command("XADD", key, *trim, entry_id, *fields)

    def jobs(self, count: int, queue: str = "q", start: int = 0) -> None:
        for number in range(start, start + count):
            slot = encode_slot({"n": number})
            self.xadd(self.keys(queue).stream, "d", encode_envelope(f"job-{number}", slot, T0 + number), "n", "work")

    def events(self, count: int, queue: str = "q", start: int = 1) -> None:
        """Events of ids 1-0, 2-0, ..."""
        for number in range(start, start + count):
            extra = {"attempt": 1, "duration_us": number, "created_at_ms": T0, "worker": "w"}
            fields = encode_event_fields("completed", f"job-{number}", T0 + number, "work", extra)
            self.xadd(self.keys(queue).events, *fields, entry_id=f"{number}-0")

    def letter(self, job_id: str, payload: Any, queue: str = "q", **entry: Any) -> str:
        envelope = encode_envelope(job_id, encode_slot(payload), entry.pop("created_ms", T0), 3)
        letter = DlqEntry(
            dlq_id="",
            source_id="1-1",
            reason=entry.pop("reason", "retries_exhausted"),
            payload=envelope,
            name="work",
            **{"error_type": "ValueError", "error": "no", "attempts": 3, "failed_at_ms": T0} | entry,
        )
        return self.xadd(self.keys(queue).dlq, *encode_dlq_fields(letter)).decode()

    def delayed(self, count: int, queue: str = "q", due_ms: int = T0) -> None:
        for number in range(count):
            member = encode_delayed_member("later", encode_envelope(f"later-{number}", encode_slot(number), T0))
            self.client.zadd(self.keys(queue).delayed, {member: due_ms + number // 3})

    def waiting(self, queue: str = "q") -> list[Any]:
        """The jobs in the stream."""
        entries = self.client.execute_command("XRANGE", self.keys(queue).stream, "-", "+", NEVER_DECODE=[])
        found = []
        for _, fields in entries:
            flat = [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else fields
            values = dict(zip(flat[::2], flat[1::2], strict=True))
            found.append(decode_job(values[b"d"], values.get(b"n", b"").decode()))
        return found

    def payloads(self, queue: str = "q") -> list[Any]:
        return [job.payload for job in self.waiting(queue)]
