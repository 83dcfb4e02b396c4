"""All errors raised by tampu, each with a stable code (CMQ-xxx).

This module is at the bottom of the package: it imports nothing else from tampu.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Error(RuntimeError):
    """Base class of all tampu errors. `code` is stable across languages and versions.

    It is a `RuntimeError` because chasquimq raises that, so code that catches it keeps working with tampu.
    """

    code: ClassVar[str] = "CMQ-000"

    #: IDs from the same bulk call that were added before the error.
    accepted: Sequence[str] = ()


class RedisError(Error):
    """The server could not be reached or returned an error."""

    code = "CMQ-001"


class EncodeError(Error, TypeError, ValueError):
    """A value cannot be encoded as MessagePack without loss. Nothing was sent."""

    code = "CMQ-002"


class DecodeError(Error, ValueError):
    """Bytes do not match the wire format. `job_id` is set if they are the payload of a job."""

    code = "CMQ-003"
    job_id: str | None = None


class ConfigError(Error, ValueError):
    """An argument or setting is invalid. The message names it, the value given and the values allowed."""

    code = "CMQ-004"


class ShutdownError(Error):
    """The object has been closed or is closing."""

    code = "CMQ-005"


class QueueFullError(Error):
    """The queue has reached its `max_stream_len`, and jobs were refused. No job was deleted.

    `accepted` holds the IDs from the same call that were added, `refused` those that were not, both in the order given.
    """

    code = "CMQ-006"

    def __init__(self, message: str, *, accepted: Sequence[str] = (), refused: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.accepted = list(accepted)
        self.refused: list[str] = list(refused)


class OutcomeUnknownError(Error):
    """The reply was lost with the connection: the jobs in `ids` may or may not have been added."""

    code = "CMQ-007"

    def __init__(self, message: str, *, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids: list[str] = list(ids)


class JobFailed(Error):  # noqa: N818 - a public name of the API
    """The awaited job was dead-lettered. `reason` is the reason of the dead letter, `detail` its last error."""

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


class ResultNotStored(Error):  # noqa: N818 - a public name of the API
    """The awaited job succeeded, but its result could not be stored. The message says why."""

    code = "CMQ-012"


class NotSupportedError(Error):
    """The server or the wire format does not support this call. The message says what to do instead."""

    code = "CMQ-009"


class SoftTimeout(asyncio.CancelledError):
    """Raised inside a task at its `soft_timeout`, to let it clean up before its `timeout`.

    Like `asyncio.CancelledError` it passes through `except Exception` and ends task groups. A run that does not catch
    it fails with `TimeoutError`.
    """
