"""Search: a queue by its name, or a job by its ID in all queues, with a bounded number of look-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.dashboard.app import NotFound, Page
from tampu.errors import DecodeError
from tampu.inspect.glance import chunks
from tampu.wire.entry import due_field
from tampu.wire.keys import QueueKeys
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.redis.connection import Part

#: Entries of each stream that are read around the time in an ID, and the slack of clocks, in milliseconds.
AROUND = 200
SLACK_MS = 5000
#: Queues that are searched around that time.
MAX_QUEUES = 200


async def page(ask: Ask) -> Page:
    """Return where to find what was searched for."""
    words = ask.query.get("text", "").strip()
    if words in ask.watch.glances:
        return _to(ask, "queue", words)
    names = [name for name in ask.queue_names() if words and words.lower() in name.lower()]
    if names:
        return Page("search.html", "Search", "", {"queues": names}, {"names": names[:100], "jobs": [], "words": words})
    found = await _find(ask, words) if words and len(words) <= 1024 else []
    if not found:
        raise NotFound(f"no queue or job {words!r}: it never existed, or its records have expired")
    jobs = [(name, words) for name in found]
    return Page("search.html", "Search", "", {"queues": [], "jobs": jobs}, {"names": [], "jobs": jobs, "words": words})


def _to(ask: Ask, path: str, name: str) -> Page:
    return Page("search.html", "Search", "", {"queues": [name]}, {"names": [name], "jobs": [], "words": name})


async def _find(ask: Ask, job_id: str) -> list[str]:
    """Return the queues that know a job: by its keys, or around the time in its ID in their streams."""
    clients = await ask.board.view.clients(ask.watch.glances)
    queues = [QueueKeys(name) for name in ask.queue_names()]
    found = []
    for some in chunks(queues, clients):
        client = clients[some[0].queue_name]
        replies = await client.call_each([command for keys in some for command in _lookups(keys, job_id)])
        width = len(replies) // len(some)
        for number, keys in enumerate(some):
            if any(
                isinstance(reply, bytes | int) and reply for reply in replies[number * width : (number + 1) * width]
            ):
                found.append(keys.queue_name)
    try:
        born_ms = max(decode_ulid_time(job_id) - SLACK_MS, 0)
    except DecodeError:
        return found
    needle = job_id.encode(errors="replace")
    for some in chunks(queues[:MAX_QUEUES], clients) if not found else ():
        client = clients[some[0].queue_name]
        streams = [(keys, stream) for keys in some for stream in (keys.events, keys.stream, keys.dlq)]
        asked = [("XRANGE", stream, born_ms, "+", "COUNT", AROUND) for _, stream in streams]
        for (keys, _), entries in zip(streams, await client.call_each(asked), strict=True):
            for _, fields in entries if isinstance(entries, list) else ():
                if any(needle in part for part in fields) and keys.queue_name not in found:
                    found.append(keys.queue_name)
    return found


def _lookups(keys: QueueKeys, job_id: str) -> tuple[tuple[Part, ...], ...]:
    return (
        (
            "EXISTS",
            keys.result(job_id),
            keys.cancel_mark(job_id),
            keys.delayed_index(job_id),
            keys.dedup_marker(job_id),
        ),
        ("HGET", keys.due, due_field(job_id)),
    )
