"""Fields of stream entries as the server returns them: a flat list of names and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.errors import EncodeError

if TYPE_CHECKING:
    from collections.abc import Sequence


def first_values(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Field to value; of a field that is there twice the first counts, as in every implementation."""
    values: dict[bytes, bytes] = {}
    for field, value in zip(fields[::2], fields[1::2], strict=False):
        values.setdefault(field, value)
    return values


def text_or_empty(value: bytes | None) -> str:
    """A name as text; a missing one, or one that is not UTF-8, counts as empty."""
    if not value:
        return ""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""


def read_job_fields(fields: Sequence[bytes]) -> tuple[bytes | None, str]:
    """(envelope bytes, name) of an entry of the main stream; None when it has no field `d`."""
    if len(fields) == 2 and fields[0] == b"d":
        return fields[1], ""
    if len(fields) == 4 and fields[0] == b"d" and fields[2] == b"n":
        return fields[1], text_or_empty(fields[3])
    values = first_values(fields)
    return values.get(b"d"), text_or_empty(values.get(b"n"))


def job_fields(envelope: bytes, name: str) -> list[bytes]:
    """The fields of an entry of the main stream: the name is left out when it is empty."""
    return [b"d", envelope, b"n", exact_text("name", name)] if name else [b"d", envelope]


def exact_text(field: str, text: str) -> bytes:
    """A name or an id as UTF-8: one that UTF-8 cannot carry is refused, since another one would be found instead."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"{field} {text!r} cannot be written as UTF-8: {error}") from error


def any_text(text: str) -> bytes:
    """What people read, such as an error's message, as UTF-8: nothing of it may stop the entry from being written."""
    return text.encode(errors="replace")
