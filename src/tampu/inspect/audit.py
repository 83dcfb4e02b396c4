"""Audit events: who changed a queue from outside of a worker, and how. Written to the queue's events stream."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, Literal

from tampu.redis.faults import ServerError
from tampu.wire.events import EventName, encode_event_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

AuditAction = Literal["cancel", "delete-schedule", "pause", "purge", "remove", "replay", "resume"]

#: The environment variable with the operator's name. Defaults to `user@host`.
OPERATOR_VARIABLE = "TAMPU_OPERATOR"
#: Longest name and longest reason in an event, in characters.
MAX_TEXT = 500
#: Events kept, about: the default of workers (`events_max_stream_len`).
EVENTS_KEPT = 100_000


def operator_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the operator's name: `TAMPU_OPERATOR`, or `user@host`."""
    if name := environ.get(OPERATOR_VARIABLE, "").strip():
        return name[:MAX_TEXT]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:MAX_TEXT]


async def record(
    client: Client, keys: QueueKeys, action: AuditAction, operator: str, *, count: int = 1, detail: str = ""
) -> None:
    """Write an audit event after a change. A server that refuses it, for lack of memory or by its ACL, is ignored."""
    extra: dict[str, str | int] = {"action": action, "operator": operator, "count": count}
    if detail:
        extra["detail"] = detail[:MAX_TEXT]
    fields = encode_event_fields(EventName.AUDIT, "", await client.server_time_ms(), "", extra)
    try:
        await client.call("XADD", keys.events, "MAXLEN", "~", EVENTS_KEPT, "*", *fields)
    except ServerError as error:
        if error.kind not in ("OOM", "MISCONF", "NOPERM"):
            raise
