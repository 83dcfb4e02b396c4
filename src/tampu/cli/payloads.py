"""Converts payloads, results and other wire values to JSON and to one line of text.

MessagePack has types that JSON lacks: bytes become `{"$base64": "..."}`, extension types
`{"$ext": code, "$base64": ...}`; NaN, infinities and keys that are not strings become text.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import date, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from tampu.cli.redact import redacted
from tampu.errors import DecodeError
from tampu.wire.codec import (
    CODEC_VARIABLE,
    KEYS_VARIABLE,
    SEALED,
    QueueCodec,
    codec_from_environment,
    describe_sealed,
)
from tampu.wire.envelope import decode_job
from tampu.wire.payload import decode_slot

if TYPE_CHECKING:
    from tampu.wire.job import Job

#: Maximum length of a payload shown in one line, in characters.
MAX_SHOWN = 120
#: Maximum nesting depth shown; deeper values are replaced by the name of their type.
MAX_LEVELS = 200


def jsonable(value: Any, level: int = 0) -> Any:
    """Return a value that JSON can represent. Never raises."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Enum):
        return jsonable(value.value, level)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$base64": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, msgspec.msgpack.Ext):
        return {"$ext": value.code, "$base64": base64.b64encode(bytes(value.data)).decode()}
    if level >= MAX_LEVELS:
        return {"$deeper": type(value).__name__}
    if isinstance(value, Mapping):
        return {_key(key): jsonable(item, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item, level + 1) for item in value]
    return str(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(jsonable(key))


def queue_codec(queue: str) -> QueueCodec | None:
    """Return the codec of `TAMPU_CODEC` for a queue; None if it is not set."""
    return QueueCodec.of(codec_from_environment(), queue)


def payload_of(job: Job[Any], queue: str, *, raw: bool) -> Any:
    """Return a job's payload, its bytes if `raw`, or a description of the error if it cannot be decoded.

    An encrypted or signed payload is opened with the codec of the environment; without one, it is described.
    """
    if raw:
        return redacted("payload", job.payload_slot)
    try:
        codec = queue_codec(queue)
        if codec is not None:
            return redacted("payload", decode_slot(codec.open_slot(job.payload_slot, job.name)))
        return redacted("payload", shown_value(job.payload))
    except DecodeError as error:
        content = redacted("payload", job.payload_slot)
        return {"$undecodable": str(error), **(jsonable(content) if isinstance(content, bytes) else {})}


def shown_value(value: Any) -> Any:
    """Return a decoded payload or result; a sealed one is described."""
    if isinstance(value, bytes) and value.startswith(SEALED):
        return {"$sealed": describe_sealed(value[len(SEALED) :]), "$base64": base64.b64encode(value).decode()}
    return value


def envelope_of(packed: bytes, name: str = "") -> Job[Any] | None:
    """Return the job in an envelope, or None if the bytes are not an envelope."""
    try:
        return decode_job(packed, name)
    except DecodeError:
        return None


def one_line(value: Any, limit: int = MAX_SHOWN) -> str:
    """Return a value as one line of text, cut to `limit` characters."""
    if isinstance(value, bytes):
        text = repr(value)
    elif isinstance(value, dict) and "$undecodable" in value:
        text = f"cannot be decoded: {value['$undecodable']}"
    elif isinstance(value, dict) and "$sealed" in value:
        text = f"({value['$sealed']}; set {CODEC_VARIABLE} and {KEYS_VARIABLE} to read it)"
    else:
        text = json.dumps(jsonable(value), ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
