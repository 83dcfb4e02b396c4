"""Encode and decode waiting jobs: entries of the main stream and members of the delayed set.

The server returns the fields of an entry as a flat list of names and values. A member of the delayed set is the name's
length (4 bytes, little-endian), the name, and the envelope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.base.checks import MAX_TIME_MS
from tampu.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_NAME = b"\x00\x00\x00\x00"


def first_values(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the values by field. If a field is repeated, the first value is used, as in every implementation."""
    values: dict[bytes, bytes] = {}
    for field, value in zip(fields[::2], fields[1::2], strict=False):
        values.setdefault(field, value)
    return values


def text_or_empty(value: bytes | None) -> str:
    """Return a name as text; an empty string if it is missing or not UTF-8."""
    if not value:
        return ""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""


def read_job_fields(fields: Sequence[bytes]) -> tuple[bytes | None, str]:
    """Return (envelope, name) of an entry of the main stream; the envelope is None if there is no field `d`."""
    if len(fields) == 2 and fields[0] == b"d":
        return fields[1], ""
    if len(fields) == 4 and fields[0] == b"d" and fields[2] == b"n":
        return fields[1], text_or_empty(fields[3])
    values = first_values(fields)
    return values.get(b"d"), text_or_empty(values.get(b"n"))


def job_fields(envelope: bytes, name: str) -> list[bytes]:
    """Return the fields of an entry of the main stream; an empty name is left out."""
    return [b"d", envelope, b"n", exact_text("name", name)] if name else [b"d", envelope]


def exact_text(field: str, text: str) -> bytes:
    """Encode a name or an id as UTF-8. Raises `EncodeError` for lone surrogates: replacing them would change the id."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"{field} {text!r} cannot be encoded as UTF-8: {error}") from error


def any_text(text: str) -> bytes:
    """Encode human-readable text, such as an error message, as UTF-8. Never fails: replaces lone surrogates."""
    return text.encode(errors="replace")


def entry_order(entry_id: bytes | str) -> tuple[int, int]:
    """Return the two numbers of an entry ID, its milliseconds and its sequence: they sort IDs as the stream does."""
    ms, _, number = entry_id.decode().partition("-") if isinstance(entry_id, bytes) else entry_id.partition("-")
    return int(ms), int(number or 0)


def entry_ms(entry_id: bytes | str) -> int:
    """Return when an entry was added, in epoch milliseconds."""
    return entry_order(entry_id)[0]


def score_ms(score: bytes) -> int:
    """Return a score of a sorted set as milliseconds. A value out of range, such as inf, is clamped."""
    try:
        value = float(score)
    except ValueError:
        return 0
    return int(min(max(value, 0.0), float(MAX_TIME_MS))) if value == value else 0


def due_field(job_id: str) -> str:
    """Return the field of a job in the hash of due times (`redis/lua/lib/due_time.lua`): the end of its ID."""
    return job_id[-10:]


def encode_delayed_member(name: str, envelope: bytes) -> bytes:
    """Return a job as a member of the delayed set."""
    if not name:
        return _NO_NAME + envelope
    encoded = exact_text("name", name)
    return len(encoded).to_bytes(4, "little") + encoded + envelope


def decode_delayed_member(member: bytes) -> tuple[str, bytes]:
    """Return (name, envelope) of a member. Raises `DecodeError` if the length is missing or too large."""
    if len(member) < 4:
        raise DecodeError(f"a delayed member must start with 4 bytes of length; got only {len(member)} bytes")
    end = 4 + int.from_bytes(member[:4], "little")
    if end > len(member):
        raise DecodeError(f"a delayed member of {len(member)} bytes claims a name of {end - 4} bytes")
    try:
        return member[4:end].decode(), member[end:]
    except UnicodeDecodeError as error:
        raise DecodeError(f"a delayed member's name is not UTF-8: {error}") from error
