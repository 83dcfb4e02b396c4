"""What a supervisor tells its children: which queues to serve and how. It travels as JSON on their command line."""

from __future__ import annotations

from typing import Any

import msgspec


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child needs. Secrets are not in it: the URL travels as the variable TAMPU_URL."""

    #: `module:attribute`, once or more.
    targets: list[str]
    #: Settings of the Worker that were given on the command line.
    settings: dict[str, Any] = {}
    log_format: str = "text"
    log_level: str = "info"
    #: Which jobs are logged: none, failed or all.
    log_jobs: str = "failed"
    #: Whether to gather metrics.
    metrics: bool = False

    def to_argument(self) -> str:
        """As one argument of a command line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_argument(cls, text: str) -> WorkerPlan:
        """The plan in such an argument."""
        return msgspec.json.decode(text, type=WorkerPlan)


class Report(msgspec.Struct, kw_only=True):
    """What a child tells of itself, a few times a second."""

    #: imported, running or draining.
    state: str
    #: Seconds since a server last answered a read; None before the first.
    silent_secs: float | None = None
    #: False while a handler blocks the event loop for too long.
    is_healthy: bool = True
    #: Of its Worker: how long a read may take, and how long it may take to drain.
    block_secs: float = 5.0
    deadline_secs: float = 30.0
    queues: list[str] = []
    #: The answer to a request for metrics, in Prometheus' text form.
    metrics: str | None = None
