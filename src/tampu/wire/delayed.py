"""The members of the delayed set: the name's length (4 bytes, little-endian), the name, the envelope."""

from __future__ import annotations

from tampu.errors import DecodeError
from tampu.wire.entry import exact_text

#: What a member without a name starts with.
NO_NAME = b"\x00\x00\x00\x00"
#: How an envelope with an id of 26 bytes, such as every ULID, starts.
_ULID_STARTS = (b"\x94\xba", b"\x95\xba")


def encode_delayed_member(name: str, envelope: bytes) -> bytes:
    """A member of the delayed set."""
    if not name:
        return NO_NAME + envelope
    encoded = exact_text("name", name)
    return len(encoded).to_bytes(4, "little") + encoded + envelope


def decode_delayed_member(member: bytes) -> tuple[str, bytes]:
    """(name, envelope bytes) of a member; `DecodeError` when the length in front does not fit or is missing."""
    if len(member) < 4:
        raise DecodeError(f"a delayed member starts with 4 bytes of length; got {len(member)} bytes in all")
    end = 4 + int.from_bytes(member[:4], "little")
    if end > len(member):
        raise DecodeError(f"a delayed member of {len(member)} bytes claims a name of {end - 4} bytes")
    try:
        return member[4:end].decode(), member[end:]
    except UnicodeDecodeError as error:
        raise DecodeError(f"a delayed member's name is not UTF-8: {error}") from error


def quick_job_id(member: bytes) -> bytes | None:
    """The id in a member of the form that nearly all have; None for others, which need to be decoded."""
    start = 4 + int.from_bytes(member[:4], "little")
    if member[start : start + 2] in _ULID_STARTS and len(member) > start + 28 and member[4:start].isascii():
        return member[start + 2 : start + 28]
    return None
