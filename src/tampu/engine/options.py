"""What one add may say besides its payload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tampu.checks import check_job_id, check_job_name, refuse
from tampu.wire.retry import JobRetryOverride


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """What one add may say besides its payload. Chainable: `AddOptions().with_name("mail").with_id("7")`."""

    #: An id of the caller's: the same id is not added twice. None mints a ULID.
    id: str | None = None
    #: The job's own retry settings.
    retry: JobRetryOverride | None = None
    #: The name handlers are chosen by; at most 256 bytes.
    name: str = ""

    def __post_init__(self) -> None:
        if self.id is not None:
            check_job_id(self.id)
        if self.retry is not None and not isinstance(self.retry, JobRetryOverride):
            raise refuse("retry", self.retry, "a JobRetryOverride or None")
        check_job_name(self.name)

    def with_id(self, id: str) -> Self:  # noqa: A002 - the field's name
        """The same options with this id."""
        return replace(self, id=id)

    def with_retry(self, retry: JobRetryOverride) -> Self:
        """The same options with these retry settings."""
        return replace(self, retry=retry)

    def with_name(self, name: str) -> Self:
        """The same options with this name."""
        return replace(self, name=name)
