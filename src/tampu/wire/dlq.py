"""Dead letters: why a job was dead-lettered, the fields of an entry of the dlq stream, and clusters of like letters.

`d`, `n`, `source_id`, `reason` and `detail` are fields of the ChasquiMQ format. tampu adds the others to help with
debugging; other implementations ignore them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tampu.errors import DecodeError
from tampu.wire.entry import any_text, exact_text, first_values, text_or_empty
from tampu.wire.payload import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Sequence

#: `detail` of a malformed entry without a payload field, exactly as other implementations write it.
MISSING_PAYLOAD = "missing or non-bytes payload field"


class DlqReason(StrEnum):
    """Why a job was dead-lettered."""

    RETRIES_EXHAUSTED = "retries_exhausted"
    DECODE_FAILED = "decode_failed"
    MALFORMED = "malformed"
    OVERSIZE_PAYLOAD = "oversize_payload"
    UNRECOVERABLE = "unrecoverable"
    EXPIRED = "expired"

    @property
    def code(self) -> str:
        """The stable code, CMQ-020 to CMQ-025."""
        return _CODES[self]

    def as_str(self) -> str:
        """Return the reason as it is on the wire, which is also its label in metrics."""
        return str(self.value)

    def detail(self) -> str | None:
        """Return the default detail of `malformed`; None for the other reasons."""
        return MISSING_PAYLOAD if self is DlqReason.MALFORMED else None


_CODES = {reason: f"CMQ-{20 + number:03d}" for number, reason in enumerate(DlqReason)}


@dataclass(frozen=True, kw_only=True, slots=True)
class DlqEntry:
    """One dead letter. The first six fields are on every implementation's entries, the rest only on tampu's."""

    dlq_id: str
    source_id: str
    reason: str
    detail: str | None = None
    #: The original envelope; empty if there was none.
    payload: bytes = b""
    name: str = ""
    #: Type and message of the last error, truncated.
    error_type: str | None = None
    error: str | None = None
    #: The end of the traceback, truncated.
    traceback: str | None = None
    #: Total number of attempts.
    attempts: int | None = None
    worker: str | None = None
    failed_at_ms: int | None = None
    #: All fields of a malformed entry, in their original order.
    original: tuple[tuple[bytes, bytes], ...] | None = None

    @property
    def error_text(self) -> str:
        """Type and message of the error, such as `ConnectionError: refused`; the detail if there is no message."""
        message = self.error or self.detail or ""
        return f"{self.error_type}: {message}" if self.error_type and message else message or self.error_type or ""

    @property
    def fingerprint(self) -> str:
        """The error's text with numbers, IDs and quoted values replaced."""
        return fingerprint(self.error if self.error is not None else self.detail)

    @property
    def cluster(self) -> str:
        """ID of the letters with the same reason, error type and fingerprint."""
        return cluster_id(self.reason, self.error_type, self.fingerprint)


#: The fields that may be missing, in their order on the wire, and their attributes.
_OPTIONAL = {
    b"detail": "detail",
    b"error_type": "error_type",
    b"error": "error",
    b"traceback": "traceback",
    b"attempts": "attempts",
    b"worker": "worker",
    b"ts": "failed_at_ms",
}
_NUMBERS = (b"attempts", b"ts")


def encode_dlq_fields(entry: DlqEntry) -> list[bytes]:
    """Return the fields of a dead letter: the ChasquiMQ fields in their order, then tampu's. Leaves out `dlq_id`."""
    fields = [b"d", entry.payload]
    if entry.name:
        fields += (b"n", exact_text("name", entry.name))
    fields += (b"source_id", exact_text("source_id", entry.source_id), b"reason", exact_text("reason", entry.reason))
    for field, attribute in _OPTIONAL.items():
        if (value := getattr(entry, attribute)) is not None:
            fields += (field, any_text(str(value)))
    if entry.original is not None:
        fields += (b"original", encode_value([part for pair in entry.original for part in pair]))
    return fields


def decode_dlq_fields(dlq_id: str, fields: Sequence[bytes]) -> DlqEntry:
    """Decode a dead letter of any implementation. Never raises: unreadable fields are left out."""
    values = first_values(fields)
    optional: dict[str, Any] = {}
    for field, attribute in _OPTIONAL.items():
        value = values.get(field)
        if field not in _NUMBERS:
            optional[attribute] = None if value is None else value.decode(errors="replace")
        elif value is not None and value.isdigit() and len(value) <= 20:
            optional[attribute] = int(value)
    return DlqEntry(
        dlq_id=dlq_id,
        source_id=values.get(b"source_id", b"").decode(errors="replace"),
        reason=values.get(b"reason", b"").decode(errors="replace"),
        payload=values.get(b"d", b""),
        name=text_or_empty(values.get(b"n")),
        original=_decode_original(values.get(b"original")),
        **optional,
    )


def _decode_original(packed: bytes | None) -> tuple[tuple[bytes, bytes], ...] | None:
    if packed is None:
        return None
    try:
        parts = decode_value(packed)
    except DecodeError:
        return None
    if not isinstance(parts, list) or len(parts) % 2 or not all(isinstance(part, bytes) for part in parts):
        return None
    return tuple(zip(parts[::2], parts[1::2], strict=True))


#: (pattern, replacement), applied in this order. Java's and Python's regular expressions agree on all of them, so that
#: Spark computes the same fingerprints. (They disagree on the ends of words: in Java, é is part of one.)
RULES = (
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<uuid>"),
    (r"(?<![0-9A-Za-z_])[0-9A-HJKMNP-TV-Z]{26}(?![0-9A-Za-z_])", "<ulid>"),
    (r"0x[0-9a-fA-F]+", "<hex>"),
    (r"'[^']*'", "<text>"),
    (r'"[^"]*"', "<text>"),
    (r"\d+", "<n>"),
)
#: Longest fingerprint, in characters.
MAX_FINGERPRINT = 200
#: Characters that are removed at both ends.
BLANKS = " \t\n\v\f\r"

_RULES = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement in RULES]


def fingerprint(text: str | None) -> str:
    """Return an error's text without what varies from one occurrence to the next."""
    shape = text or ""
    for pattern, replacement in _RULES:
        shape = pattern.sub(replacement, shape)
    return shape[:MAX_FINGERPRINT].strip(BLANKS)


def cluster_id(reason: str | None, error_type: str | None, shape: str) -> str:
    """Return the short name of the letters that share reason, error type and fingerprint."""
    parts = [part for part in (reason, error_type, shape) if part is not None]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]
