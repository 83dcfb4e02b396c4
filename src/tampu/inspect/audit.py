"""Audit events: who changed a queue from outside a worker, and how. Written to its events stream and logged."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from typing import TYPE_CHECKING, Literal

from tampu.base.clock import wall_clock_ms
from tampu.errors import RedisError
from tampu.redis.faults import ServerError
from tampu.wire.events import EventName, encode_event_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys

AuditAction = Literal["cancel", "delete", "delete-schedule", "drain", "pause", "purge", "remove", "replay", "resume"]

logger = logging.getLogger("tampu.audit")

#: The environment variable with the operator's name. Defaults to `user@host`.
OPERATOR_VARIABLE = "TAMPU_OPERATOR"
#: Longest name and longest reason in an event, in characters.
MAX_TEXT = 500
#: Events kept, about: the default of workers (`events_max_stream_len`).
EVENTS_KEPT = 100_000


def operator_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the operator's name: `TAMPU_OPERATOR`, or `user@host`."""
    if name := environ.get(OPERATOR_VARIABLE, "").strip():
        return name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


async def record(
    client: Client,
    keys: QueueKeys,
    action: AuditAction,
    operator: str,
    *,
    count: int = 1,
    detail: str = "",
    create: bool = True,
) -> None:
    """Write an audit event for a change and log it. `create=False` writes it only if the queue already has events.

    An event that cannot be written is logged and raises nothing, so that it does not look like a failed change. A
    refusal by the server, for lack of memory or because of its ACL, is ignored.
    """
    operator, detail = operator[:MAX_TEXT], detail[:MAX_TEXT]
    logger.info("queue %r: %s by %s (count %d)%s", keys.queue_name, action, operator, count, detail and f": {detail}")
    extra: dict[str, str | int] = {"action": action, "operator": operator, "count": count}
    if detail:
        extra["detail"] = detail
    fields = encode_event_fields(EventName.AUDIT, "", wall_clock_ms(), "", extra)
    options = () if create else ("NOMKSTREAM",)
    try:
        await client.call("XADD", keys.events, *options, "MAXLEN", "~", EVENTS_KEPT, "*", *fields)
    except RedisError as error:
        if not isinstance(error, ServerError) or error.kind not in ("OOM", "MISCONF", "NOPERM"):
            logger.warning("the audit event of %s in queue %r was not written: %s", action, keys.queue_name, error)
