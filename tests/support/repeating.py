"""Schedules for tests: created by a producer, then made due when the test says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.producers import open_producer
from tampu import RepeatableSpec, RepeatPattern
from tampu.wire.repeat import encode_spec

if TYPE_CHECKING:
    from support.queues import QueueView
    from tampu.wire.repeat import StoredSpec


async def register(view: QueueView, pattern: RepeatPattern, name: str = "tick", **spec: Any) -> str:
    """Create a schedule and return its key."""
    async with open_producer(view.server.url, queue_name=view.name) as producer:
        return await producer.upsert_repeatable(RepeatableSpec(name, pattern, {"k": 1}, **spec))


def write_spec(view: QueueView, spec: StoredSpec, due_ms: float) -> None:
    """Write a schedule directly, as another process might leave it, even if a producer would refuse it."""
    view.client.hset(view.keys.repeat_spec(spec.key), "spec", encode_spec(spec))
    make_due(view, spec.key, due_ms)


def make_due(view: QueueView, key: str, due_ms: float) -> None:
    view.client.zadd(view.keys.repeat, {key: due_ms})


def next_fire(view: QueueView, key: str) -> int | None:
    score = view.client.zscore(view.keys.repeat, key)
    return None if score is None else int(score)


def fired(view: QueueView, key: str) -> int:
    return int(view.client.hget(view.keys.repeat_spec(key), "fired") or 0)


def repeat_keys(view: QueueView) -> set[str]:
    """Return the keys of schedules that are left on the server."""
    return {name for name in view.all_keys() if name.startswith(":repeat")}
