"""The payloads that everybody sends."""

from __future__ import annotations

from typing import Any

#: About 100 bytes, as MessagePack and as JSON alike.
PAYLOAD: dict[str, Any] = {"to": "ada@example.com", "subject": "Welcome aboard", "body": "x" * 60}
#: The body of an RSMQ message.
MESSAGE = "x" * 100


def payload_of(size: int) -> dict[str, Any]:
    """A payload of about so many bytes."""
    return {**PAYLOAD, "body": "x" * max(size - 40, 1)}
