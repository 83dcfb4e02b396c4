"""Messages: IDs, bodies, encoders and decoders.

An encoder is a function that returns str or bytes (`json.dumps`, `msgspec.json.encode`), a decoder a function that
takes bytes (`json.loads`, or `bytes` for the raw body). Without them messages are text; bytes are sent unchanged.

An ID is the server's time in microseconds in base 36, followed by 22 random characters. A script on the server creates
the first part. The client creates the second: Lua's random numbers repeat after a restart.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tampu.base.checks import shown
from tampu.errors import EncodeError
from tampu.rsmq.errors import CannotDecodeMessage, MessageNotString
from tampu.rsmq.options import parse_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.rsmq.options import SizeUnit

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Encoder = Callable[[T], str | bytes]
Decoder = Callable[[bytes], T]

RANDOM_CHARS = 22
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits
#: Maps a byte to a character. 256 is not a multiple of 62, so some are more likely: 130.9 bits instead of 131.
_CHARACTERS = bytes(ord(_ALPHABET[byte % len(_ALPHABET)]) for byte in range(256))
#: The time part has ten digits until about the year 2085.
_TIME = re.compile(r"[0-9a-zA-Z]{1,10}")


@dataclass(frozen=True, slots=True)
class RsmqMessage(Generic[T_co]):
    """A message that was received or popped."""

    #: For `delete_message` and `change_message_visibility`.
    id: str
    #: The decoded body. Without a decoder: text, with invalid UTF-8 replaced, as in JavaScript; see `body`.
    message: T_co
    #: How often it has been received, including this time.
    rc: int
    #: When it was first received: Unix time in ms (in microseconds with `precision="us"`); 0 if another client stored
    #: something else.
    fr: int
    #: The original bytes.
    body: bytes

    @property
    def sent(self) -> float:
        """When it was sent: Unix time in ms, with the microseconds as a fraction."""
        return sent_ms(self.id)


def random_part() -> bytes:
    """Return 22 random characters that make an ID unique. Python reseeds `random` in a forked child."""
    return random.randbytes(RANDOM_CHARS).translate(_CHARACTERS)


def sent_ms(message_id: str) -> float:
    """Return the time in a message's ID: Unix time in ms, microseconds as a fraction; NaN if the ID is not valid."""
    found = _TIME.match(message_id)
    return int(found[0], 36) / 1000 if found else math.nan


def encode(message: object, encoder: Encoder[Any] | None, size_unit: SizeUnit) -> tuple[bytes, int | None]:
    """Return a message's body, and its size if `size_unit` does not count bytes."""
    value = message if encoder is None else encoder(message)
    if isinstance(value, str):
        try:
            body = value.encode()
        except UnicodeEncodeError:
            raise EncodeError(f"message must not contain lone surrogates; got {shown(value)}") from None
        # The length of a string in JavaScript.
        return body, None if size_unit == "bytes" else len(value.encode("utf-16-le")) // 2
    if isinstance(value, bytes | bytearray | memoryview):
        body = bytes(value)
        return body, None if size_unit == "bytes" else len(body)
    raise MessageNotString(value)


def decode_text(body: bytes) -> str:
    """Decode a body as JavaScript does: replace invalid UTF-8."""
    return body.decode(errors="replace")


def decode(fields: Sequence[Any], decoder: Decoder[T]) -> RsmqMessage[T]:
    """Return the message of a receive script's reply: ID, body, receive count, first received."""
    raw_id, body, count, first = fields
    message_id = raw_id.decode(errors="surrogateescape")
    try:
        value = decoder(body)
    except Exception as error:  # a decoder may raise anything, and the caller must still get the body
        raise CannotDecodeMessage(message_id, body, error) from error
    return RsmqMessage(message_id, value, count, parse_int(decode_text(first)) or 0, body)
