"""The errors of RSMQ, with the names and messages of the JavaScript client.

`name` is the JavaScript error name and `str(error)` its exact message; the given value is an attribute. Where that
message could mislead, the error also has a note (`__notes__`), which tracebacks and the command line show.
"""

# ruff: noqa: N818 - the classes have the names of the JavaScript errors

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tampu.errors import Error

if TYPE_CHECKING:
    from collections.abc import Sequence


class RsmqError(Error):
    """Base class of RSMQ's own errors. Errors of the server and the connection are `tampu.errors.RedisError`."""

    code = "CMQ-010"
    #: The name of the error in JavaScript.
    name: ClassVar[str] = "rsmqError"

    def __init__(self, text: str, *notes: str) -> None:
        super().__init__(text)
        for note in notes:
            self.add_note(note)


class NoAttributeSupplied(RsmqError):
    """`set_queue_attributes` was called without an attribute."""

    name = "noAttributeSupplied"

    def __init__(self) -> None:
        super().__init__("No attribute was supplied")


class MissingParameter(RsmqError):
    """A queue name or a message ID is empty."""

    name = "missingParameter"

    def __init__(self, item: str) -> None:
        super().__init__(f"No {item} supplied")
        self.item = item


class InvalidFormat(RsmqError):
    """A queue name or a message ID has invalid characters or a wrong length."""

    name = "invalidFormat"

    def __init__(self, item: str, value: object, *notes: str) -> None:
        super().__init__(f"Invalid {item} format", *notes)
        self.item = item
        self.value = value


class InvalidValue(RsmqError):
    """A number is out of range."""

    name = "invalidValue"

    def __init__(self, item: str, low: int, high: int, value: object, *notes: str) -> None:
        super().__init__(f"{item} must be between {low} and {high}", *notes)
        self.item = item
        self.value = value
        self.low = low
        self.high = high


class MessageNotString(RsmqError):
    """A message is neither str nor bytes, and there is no encoder."""

    name = "messageNotString"

    def __init__(self, value: object) -> None:
        super().__init__("Message must be a string")
        self.value = value


class MessageTooLong(RsmqError):
    """A message is larger than the queue's `maxsize`; `size` is in bytes, or UTF-16 units with `size_unit="utf16"`."""

    name = "messageTooLong"

    def __init__(self, size: int) -> None:
        super().__init__("Message too long")
        self.size = size


class QueueNotFound(RsmqError):
    """The queue does not exist."""

    name = "queueNotFound"

    def __init__(self, qname: str) -> None:
        super().__init__("Queue not found")
        self.qname = qname


class QueueExists(RsmqError):
    """The queue already exists."""

    name = "queueExists"

    def __init__(self, qname: str) -> None:
        super().__init__("Queue exists")
        self.qname = qname


class CannotDecodeMessage(RsmqError):
    """A decoder failed. The message has been received; if it was popped, `body` is the only copy."""

    name = "cannotDecodeMessage"

    def __init__(self, message_id: str, body: bytes, reason: Exception) -> None:
        super().__init__(f"Message {message_id} cannot be decoded: {type(reason).__name__}: {reason}")
        self.message_id = message_id
        self.body = body


class BatchInterrupted(RsmqError):
    """`send_messages` failed after some of its calls succeeded.

    `ids` are the IDs of the messages that were sent: the first ones of the batch. `__cause__` is the error.
    """

    name = "batchInterrupted"

    def __init__(self, ids: Sequence[str], total: int, cause: Error) -> None:
        super().__init__(f"{len(ids)} of {total} messages were sent, then: {cause}")
        self.ids = list(ids)
