"""Every error tampu raises, each with the stable code of the family (CMQ-xxx).

This module is the bottom of the package: it imports nothing of tampu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Error(RuntimeError):
    """Base of all errors of tampu. `code` is stable across languages and versions.

    A `RuntimeError`, since that is what chasquimq raises: a program that catches it can change over as it is.
    """

    code: ClassVar[str] = "CMQ-000"

    #: Ids of the same call that were added before the error, when it is one of a bulk.
    accepted: Sequence[str] = ()


class RedisError(Error):
    """The server could not be reached, or answered with an error."""

    code = "CMQ-001"


class EncodeError(Error, TypeError, ValueError):
    """A value has no faithful MessagePack form, so nothing was sent."""

    code = "CMQ-002"


class DecodeError(Error, ValueError):
    """Bytes are not what the wire format says they should be. `job_id` is set when it is a job's payload."""

    code = "CMQ-003"
    job_id: str | None = None


class ConfigError(Error, ValueError):
    """An argument or a setting is not allowed: the text names it, the value given and what is allowed."""

    code = "CMQ-004"


class ShutdownError(Error):
    """The object was closed, or is closing, and takes no more work."""

    code = "CMQ-005"


class QueueFullError(Error):
    """The queue is at its `max_stream_len`: jobs were refused, none was deleted to make room.

    `accepted` holds the ids of the same call that did get in, `refused` those that did not, both in the order given.
    """

    code = "CMQ-006"

    def __init__(self, message: str, *, accepted: Sequence[str] = (), refused: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.accepted = list(accepted)
        self.refused: list[str] = list(refused)


class OutcomeUnknownError(Error):
    """The connection was lost for so long that it cannot be told whether these jobs were added: `ids` names them."""

    code = "CMQ-007"

    def __init__(self, message: str, *, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids: list[str] = list(ids)


class JobFailed(Error):  # noqa: N818 - a public name of the API
    """Raised to a waiter whose job was dead-lettered; `reason` is the dead letter's reason, `detail` its last error."""

    code = "CMQ-008"

    def __init__(self, message: str, *, job_id: str = "", reason: str = "", detail: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.reason = reason
        self.detail = detail


class JobCancelled(Error):  # noqa: N818 - a public name of the API
    """Raised to a waiter whose job was cancelled, and by `Job.check_cancelled` inside the job's handler."""

    code = "CMQ-011"

    def __init__(self, message: str, *, job_id: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id
        self.reason = reason


class NotSupportedError(Error):
    """The server, or the format on the wire, cannot do what was asked; the text says what to do instead."""

    code = "CMQ-009"
