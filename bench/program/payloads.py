"""The payloads that all contestants send."""

from __future__ import annotations

from typing import Any

#: About 100 bytes, both as MessagePack and as JSON.
PAYLOAD: dict[str, Any] = {"to": "ada@example.com", "subject": "Welcome aboard", "body": "x" * 60}
#: The body of an RSMQ message.
MESSAGE = "x" * 100


def payload_of(size: int) -> dict[str, Any]:
    """Return a payload of about `size` bytes."""
    return {**PAYLOAD, "body": "x" * max(size - 40, 1)}
