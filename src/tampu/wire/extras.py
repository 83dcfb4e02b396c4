"""Job options that only tampu knows (headers, timeouts, an expiry), written after the envelope.

Other implementations accept bytes after an envelope and ignore them, so the options survive delays and replays by any
of them. A retry by chasquimq drops them, because it writes a new envelope.

    envelope | 0xC1 | MessagePack map | its length, u16 big-endian | 0xC1 "T"

MessagePack never uses the byte 0xC1, so a value cannot be mistaken for this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

from tampu.base.checks import invalid

_LEAD = b"\xc1"
_MARK = b"\xc1T"
#: Bytes around the map.
_FRAME = len(_LEAD) + 2 + len(_MARK)
#: Longest options of one job, in bytes.
MAX_EXTRAS = 8192


class JobExtras(NamedTuple):
    """The job options written after an envelope."""

    headers: dict[str, str] = {}  # noqa: RUF012 - never changed: `Job.headers` returns a copy
    #: Overrides the task's timeout, in milliseconds.
    timeout_ms: int | None = None
    #: A job that has not started by then is dead-lettered, in epoch milliseconds.
    expires_at_ms: int | None = None
    #: Overrides the task's soft timeout, in milliseconds.
    soft_timeout_ms: int | None = None
    #: By which limits count the job. Defaults to its task's name.
    key: str | None = None


#: Their keys in the map, in the order of the fields.
_KEYS = ("h", "t", "x", "s", "k")
NO_EXTRAS = JobExtras()


def encode_extras(extras: JobExtras) -> bytes:
    """Return the bytes to write after an envelope; none if nothing is set."""
    values = {key: value for key, value in zip(_KEYS, extras, strict=True) if value is not None and value != {}}
    if not values:
        return b""
    packed: bytes = msgpack.packb(values)
    if len(packed) > MAX_EXTRAS:
        raise invalid(
            "headers", f"{len(packed):,} bytes", f"at most {MAX_EXTRAS:,} bytes; put large values into the payload"
        )
    return b"%b%b%b%b" % (_LEAD, packed, len(packed).to_bytes(2, "big"), _MARK)


def split_extras(data: bytes) -> tuple[bytes, bytes]:
    """Return an envelope and the options behind it, both as bytes. The options are empty if there are none."""
    if len(data) < _FRAME or not data.endswith(_MARK):
        return data, b""
    start = len(data) - _FRAME - int.from_bytes(data[-4:-2], "big")
    if start < 0 or data[start : start + 1] != _LEAD:
        return data, b""
    return data[:start], data[start:]


def decode_extras(tail: bytes) -> JobExtras:
    """Return the options in `tail`. Unreadable ones, and ones of later versions, are ignored."""
    if not tail:
        return NO_EXTRAS
    try:
        values = msgpack.unpackb(tail[len(_LEAD) : -len(_MARK) - 2])
    except (ValueError, msgpack.UnpackException):
        return NO_EXTRAS
    if not isinstance(values, dict):
        return NO_EXTRAS
    headers = values.get("h")
    texts = headers if isinstance(headers, dict) else {}
    timeout_ms, expires_at_ms, soft_timeout_ms = (_positive(values.get(key)) for key in _KEYS[1:4])
    own_key = values.get("k")
    return JobExtras(
        {key: value for key, value in texts.items() if isinstance(key, str) and isinstance(value, str)},
        *(timeout_ms, expires_at_ms, soft_timeout_ms),
        own_key if isinstance(own_key, str) else None,
    )


def check_headers(headers: object) -> dict[str, str]:
    """Return headers that can be sent, or raise `ConfigError`."""
    if not isinstance(headers, Mapping):
        raise invalid("headers", headers, "a mapping of text to text, such as {'tenant': 'acme'}")
    for key, value in headers.items():
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise invalid("headers", headers, "a mapping of text to text, such as {'tenant': 'acme'}")
    return dict(headers)


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
