"""Turns what people send into the bytes of a body, and back.

An encoder is any function to str or bytes (`json.dumps`, `msgspec.json.encode`), a decoder any function of bytes
(`json.loads`, `bytes` itself for the raw body). Without them messages are text, or bytes that are sent as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tampu.checks import shown
from tampu.errors import EncodeError
from tampu.rsmq.errors import CannotDecodeMessage, MessageNotString
from tampu.rsmq.message import RsmqMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.rsmq.options import SizeUnit

T = TypeVar("T")
Encoder = Callable[[T], str | bytes]
Decoder = Callable[[bytes], T]


def encode(message: object, encoder: Encoder[Any] | None, size_unit: SizeUnit) -> tuple[bytes, int | None]:
    """A message's body, and its size if that is not the number of bytes."""
    value = message if encoder is None else encoder(message)
    if isinstance(value, str):
        try:
            body = value.encode()
        except UnicodeEncodeError:
            raise EncodeError(f"the message has lone surrogates, which UTF-8 cannot carry: {shown(value)}") from None
        return body, None if size_unit == "bytes" else utf16_units(value)
    if isinstance(value, bytes | bytearray | memoryview):
        body = bytes(value)
        return body, None if size_unit == "bytes" else len(body)
    raise MessageNotString(value)


def utf16_units(text: str) -> int:
    """The length of a string in JavaScript."""
    return len(text.encode("utf-16-le")) // 2


def decode_text(body: bytes) -> str:
    """A body as JavaScript reads it: bytes that are no UTF-8 are replaced."""
    return body.decode(errors="replace")


def decode(fields: Sequence[Any], decoder: Decoder[T]) -> RsmqMessage[T]:
    """A message from what the server tells of it: id, body, receive count, first received."""
    raw_id, body, count, first = fields
    message_id = raw_id.decode(errors="surrogateescape")
    try:
        value = decoder(body)
    except Exception as error:  # a decoder may raise anything; the body must reach the caller all the same
        raise CannotDecodeMessage(message_id, body, error) from error
    return RsmqMessage(message_id, value, count, int(first), body)
