"""`tampu events [QUEUE]`: shows what happened to jobs and, with `--follow`, new events as they arrive."""

import asyncio
from collections.abc import Callable
from typing import Annotated

import typer
from typer import Option

from tampu.cli.options import OptionalQueueName
from tampu.cli.output import while_read, write_json_line, write_line
from tampu.cli.session import CommonOptions, Session, skip_if_broken
from tampu.cli.units import instant
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.timeline import details
from tampu.inspect.views import event_json, event_ms, redacted_event
from tampu.wire.entry import entry_order
from tampu.wire.events import EventName, QueueEvent

#: How often to look for new queues, in seconds.
FIND_SECS = 3.0

#: (queue, entry id, event)
Entry = tuple[str, str, QueueEvent]
Matches = Callable[[QueueEvent], bool]


def events(
    common: CommonOptions,
    queue: OptionalQueueName = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Keep printing new events until Ctrl-C.")] = False,
    name: Annotated[
        list[str] | None,
        Option(metavar="|".join(EventName), help="Only events with this name. Can be given more than once."),
    ] = None,
    job: Annotated[str | None, Option(metavar="ID", help="Only events of this job.")] = None,
    limit: Annotated[int, Option("--limit", "-n", min=0, help="Show this many recent events first; 0 for none.")] = 100,
) -> None:
    """Show events of one queue or all queues, oldest first. --json prints one JSON object per line."""
    for unknown in set(name or ()) - set(EventName):
        raise typer.BadParameter(f"no event named {unknown!r}; choose from {', '.join(EventName)}")

    def matches(event: QueueEvent) -> bool:
        return (not name or event.name in name) and (job is None or event.job_id == job)

    try:
        common.run(_show_events, queue, matches, limit, follow, common.as_json)
    except KeyboardInterrupt:
        if not follow:  # with --follow, Ctrl-C is the normal way to exit
            raise


async def _show_events(
    session: Session, name: str | None, matches: Matches, limit: int, follows: bool, as_json: bool
) -> None:
    last_ids: dict[str, str] = {}
    history: list[Entry] = []
    for admin in await session.admins(name):
        with skip_if_broken(admin.name, is_one_of_many=name is None):
            last_id = last_ids[admin.name] = await admin.newest_event_id()
            if limit:
                history += await newest_events(admin, limit, matches, last_id)
    history.sort(key=_order)
    for entry in history[-limit:] if limit else ():
        _write(entry, with_queue=name is None, as_json=as_json)
    if follows:
        await while_read(_follow(session, last_ids, matches, name is None, as_json))


async def newest_events(
    admin: QueueAdmin, limit: int, matches: Matches | None = None, last_id: str = "+"
) -> list[Entry]:
    """Return the last `limit` events up to `last_id` that match, oldest first, redacted."""
    found = await admin.newest_events(limit, matches, last_id)
    return [(admin.name, entry_id, redacted_event(event)) for entry_id, event in found]


def _order(entry: Entry) -> tuple[int, int, int]:
    """Sort by the time shown: an `active` event is written a little later than it happened."""
    _, entry_id, event = entry
    return event_ms(entry_id, event), *entry_order(entry_id)


async def _follow(
    session: Session, last_ids: dict[str, str], matches: Matches, with_queue: bool, as_json: bool
) -> None:
    arrived: asyncio.Queue[Entry] = asyncio.Queue(maxsize=1000)

    async def read(name: str, last_id: str) -> None:
        with skip_if_broken(name, is_one_of_many=with_queue):
            async with session.follow(name, last_id) as source:
                async for entry_id, event in source.entries():
                    if matches(event):
                        await arrived.put((name, entry_id, redacted_event(event)))

    async with asyncio.TaskGroup() as group:
        for name, last_id in last_ids.items():
            group.create_task(read(name, last_id))

        async def find() -> None:
            """Follow new queues from their beginning."""
            known = set(last_ids)
            while True:
                await asyncio.sleep(FIND_SECS)
                for name in set((await session.find_queues()).names) - known:
                    known.add(name)
                    group.create_task(read(name, "0-0"))

        if with_queue:
            group.create_task(find())
        while True:
            _write(await arrived.get(), with_queue=with_queue, as_json=as_json)


def _write(entry: Entry, *, with_queue: bool, as_json: bool) -> None:
    write_json_line(event_json(*entry)) if as_json else write_line(to_line(entry, with_queue=with_queue))


def to_line(entry: Entry, *, with_queue: bool, when: Callable[[int], str] = instant) -> str:
    """Return an event as one line of text; `when` formats its time."""
    queue, entry_id, event = entry
    parts = [when(event_ms(entry_id, event))]
    if with_queue:
        parts.append(f"{queue:<10}")
    parts += [f"{event.name:<15}", event.job_id or "-", event.job_name, details(event)]
    return "  ".join(part for part in parts if part)
