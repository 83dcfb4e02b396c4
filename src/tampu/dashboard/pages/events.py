"""Events: the newest of one queue, by kind, and from there back in time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tampu.dashboard.app import NotFound, Page
from tampu.inspect.streams import text
from tampu.inspect.timeline import details
from tampu.inspect.views import event_json, event_ms, redacted_event
from tampu.wire.events import EventName, decode_event_fields

if TYPE_CHECKING:
    from tampu.dashboard.app import Ask
    from tampu.wire.events import QueueEvent

#: Events on one page, and most that are read for one.
ROWS = 50
MAX_READ = 5000
STEP = 500


async def page(ask: Ask) -> Page:
    """Return the events of one queue, newest first."""
    names = ask.queue_names()
    name = ask.query.get("q") or (names[0] if names else "")
    if not name:
        return Page("events.html", "Events", "events", {"events": []}, {"name": "", "names": [], "kinds": []})
    admin = await ask.admin(name)
    kind, cursor = ask.query.get("kind", ""), ask.query.get("after", "")
    if (kind and kind not in set(EventName)) or not re.fullmatch(r"(\([0-9]{1,20}-[0-9]{1,20})?", cursor):
        raise NotFound(f"no events {kind!r} after {cursor!r}")
    found: list[tuple[str, QueueEvent]] = []
    start, looked, following = cursor or "+", 0, None
    while len(found) < ROWS and looked < MAX_READ:
        entries = await admin.client.call("XREVRANGE", admin.keys.events, start, "-", "COUNT", STEP if kind else ROWS)
        for entry_id, fields in entries:
            event = decode_event_fields(fields)
            start = f"({text(entry_id)}"
            looked += 1
            if not kind or event.name == kind:
                found.append((text(entry_id), redacted_event(event)))
                if len(found) >= ROWS:
                    break
        following = start if entries else None
        if len(entries) < (STEP if kind else ROWS) and len(found) < ROWS:
            following = None
            break
    if ask.wants_json:
        listed = [event_json(name, entry_id, event) for entry_id, event in found]
        return Page("events.html", "Events", "events", {"queue": name, "next": following, "events": listed})
    rows = [(entry_id, event_ms(entry_id, event), event, details(event)) for entry_id, event in found]
    values: dict[str, object] = {"name": name, "names": names, "kinds": list(EventName), "kind": kind, "rows": rows}
    values |= {"cursor": following, "looked": looked, "after": cursor}
    return Page("events.html", f"Events of {name}", "events", None, values)
