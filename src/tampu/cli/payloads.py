"""Payloads, results and other values from the wire, as JSON and as one line for people.

MessagePack knows more than JSON: bytes become `{"$base64": "..."}`, extension types `{"$ext": code, "$base64": ...}`,
numbers that JSON has none of become text, and so do keys.
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

from tampu.errors import DecodeError
from tampu.wire.envelope import decode_job

if TYPE_CHECKING:
    from tampu.wire.job import Job

#: Longest payload shown in a line for people, in characters.
MAX_SHOWN = 120
#: Levels of lists and dicts shown; what is deeper is named as such.
MAX_LEVELS = 200


def jsonable(value: Any, level: int = 0) -> Any:
    """A value as JSON can carry it. Never refuses."""
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


def payload_of(job: Job[Any], *, raw: bool) -> Any:
    """A job's payload; its bytes when they are asked for; what is wrong with it when it cannot be read."""
    if raw:
        return job.payload_slot
    try:
        return job.payload
    except DecodeError as error:
        return {"$undecodable": str(error), "$base64": base64.b64encode(job.payload_slot).decode()}


def envelope_of(packed: bytes, name: str = "") -> Job[Any] | None:
    """The job in an envelope; None when there is none."""
    try:
        return decode_job(packed, name)
    except DecodeError:
        return None


def one_line(value: Any, limit: int = MAX_SHOWN) -> str:
    """A value in one line for people, cut when it is long."""
    if isinstance(value, bytes):
        text = repr(value)
    elif isinstance(value, dict) and "$undecodable" in value:
        text = f"not readable: {value['$undecodable']}"
    else:
        text = json.dumps(jsonable(value), ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
