"""Payloads that are MessagePack already, on their way through a producer that encodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.engine.producer import Producer


class Encoded:
    """A payload that is MessagePack already."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed


def encode_or_pass(producer: Producer[Any]) -> Callable[[Any], bytes]:
    """Values are encoded as ever; a task's arguments are encoded already."""
    encode = producer.encode

    def encode_or_pass(value: Any) -> bytes:
        return value.packed if type(value) is Encoded else encode(value)

    return encode_or_pass
