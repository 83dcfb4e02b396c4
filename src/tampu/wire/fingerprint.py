"""Fingerprints of errors: equal for errors that differ only in numbers, IDs and quoted values."""

from __future__ import annotations

import hashlib
import re

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
