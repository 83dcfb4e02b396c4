"""The errors of RSMQ: the names and texts of the JavaScript client, so that logs and tests of both read alike.

`name` is the JavaScript error name, `str(error)` its text to the letter; what was given is in the attributes. Where
that text alone would mislead, the error has a note (`__notes__`), which tracebacks and the command line show.
"""

# ruff: noqa: N818 - the classes are called as the errors are

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tampu.errors import Error

if TYPE_CHECKING:
    from collections.abc import Sequence


class RsmqError(Error):
    """Base of the errors that RSMQ itself defines. Those of the server are `tampu.errors.RedisError`."""

    code = "CMQ-010"
    #: The name of the error in JavaScript.
    name: ClassVar[str] = "rsmqError"

    def __init__(self, text: str, *notes: str) -> None:
        super().__init__(text)
        for note in notes:
            self.add_note(note)


class NoAttributeSupplied(RsmqError):
    """`set_queue_attributes` was given nothing to set."""

    name = "noAttributeSupplied"

    def __init__(self) -> None:
        super().__init__("No attribute was supplied")


class MissingParameter(RsmqError):
    """A name or an id is empty."""

    name = "missingParameter"

    def __init__(self, item: str) -> None:
        super().__init__(f"No {item} supplied")
        self.item = item


class InvalidFormat(RsmqError):
    """A name or an id has characters it may not have, or too many."""

    name = "invalidFormat"

    def __init__(self, item: str, value: object, *notes: str) -> None:
        super().__init__(f"Invalid {item} format", *notes)
        self.item = item
        self.value = value


class InvalidValue(RsmqError):
    """A number is out of its range."""

    name = "invalidValue"

    def __init__(self, item: str, low: int, high: int, value: object, *notes: str) -> None:
        super().__init__(f"{item} must be between {low} and {high}", *notes)
        self.item = item
        self.value = value
        self.low = low
        self.high = high


class MessageNotString(RsmqError):
    """A message is neither str nor bytes, and no encoder was given to make it so."""

    name = "messageNotString"

    def __init__(self, value: object) -> None:
        super().__init__("Message must be a string")
        self.value = value


class MessageTooLong(RsmqError):
    """A message is larger than the queue's `maxsize`; `size` is in bytes, or UTF-16 units if those are counted."""

    name = "messageTooLong"

    def __init__(self, size: int) -> None:
        super().__init__("Message too long")
        self.size = size


class QueueNotFound(RsmqError):
    """There is no such queue."""

    name = "queueNotFound"

    def __init__(self, qname: str) -> None:
        super().__init__("Queue not found")
        self.qname = qname


class QueueExists(RsmqError):
    """There is such a queue already."""

    name = "queueExists"

    def __init__(self, qname: str) -> None:
        super().__init__("Queue exists")
        self.qname = qname


class CannotDecodeMessage(RsmqError):
    """A decoder refused a message. It was received (or popped: then `body` is all that is left of it)."""

    name = "cannotDecodeMessage"

    def __init__(self, message_id: str, body: bytes, reason: Exception) -> None:
        super().__init__(f"Message {message_id} cannot be decoded: {type(reason).__name__}: {reason}")
        self.message_id = message_id
        self.body = body


class BatchInterrupted(RsmqError):
    """A batch of sends failed after some of its calls succeeded. `ids` are those of the messages that were sent.

    They are the first messages of the batch. `__cause__` is the error of the call that failed.
    """

    name = "batchInterrupted"

    def __init__(self, ids: Sequence[str], total: int, cause: Error) -> None:
        super().__init__(f"{len(ids)} of {total} messages were sent, then: {cause}")
        self.ids = list(ids)
