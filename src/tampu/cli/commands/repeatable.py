"""`tampu repeatable list|remove|fire`: schedules (repeatable jobs)."""

from typing import Annotated, Any

import typer

from tampu.cli.errors import CliError
from tampu.cli.options import DryRun, QueueName, Yes, confirm
from tampu.cli.output import cell, say, show, write_json
from tampu.cli.payloads import queue_codec
from tampu.cli.session import CommonOptions, Session
from tampu.cli.tables import FittingTable
from tampu.cli.units import duration, instant, iso, plural
from tampu.errors import DecodeError
from tampu.queue import Queue
from tampu.wire.payload import decode_slot
from tampu.wire.repeat import RepeatableMeta, StoredSpec, decode_spec

app = typer.Typer(help="List, remove or fire schedules (repeatable jobs).", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of the schedule, as shown by `list`.")]


@app.command("list")
def list_(
    common: CommonOptions,
    queue: QueueName,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of schedules, soonest first.")
    ] = 100,
) -> None:
    """List schedules, soonest first."""
    found, fired, now_ms, total = common.run(_list, queue, limit)
    if common.as_json:
        write_json([_to_json(meta, count) for meta, count in zip(found, fired, strict=True)])
        return
    if not found:
        say(f"{queue} has {total:,} schedules, but none can be decoded" if total else f"{queue} has no schedules")
        return
    columns = ("key", "job", "pattern", "next fire", "in", "fired", "limit")
    made = FittingTable(*columns, numbers=("in", "fired", "limit"), spare=("limit", "fired", "next fire", "job"))
    for meta, count in zip(found, fired, strict=True):
        made.add_row(
            cell(meta.key, "bold"),
            cell(meta.job_name),
            cell(_pattern(meta)),
            cell(instant(meta.next_fire_ms)),
            cell(duration(meta.next_fire_ms - now_ms), "yellow" if meta.next_fire_ms < now_ms else ""),
            cell(count),
            cell(meta.limit or "-"),
        )
    show(made)
    if total > len(found):
        say(f"{plural(total - len(found), 'more schedule')} not shown: over --limit, or not decodable")


async def _list(session: Session, name: str, limit: int) -> tuple[list[RepeatableMeta], list[int], int, int]:
    queue = await session.queue(name)
    client, keys = queue.producer.ready_client(), queue.keys
    found = await queue.get_repeatable_jobs(limit)
    counts = await client.call_many([("HGET", keys.repeat_spec(meta.key), "fired") for meta in found])
    fired = [int(count) if count and count.isdigit() else 0 for count in counts]
    return found, fired, await client.server_time_ms(), int(await client.call("ZCARD", keys.repeat))


def _pattern(meta: RepeatableMeta) -> str:
    pattern = meta.pattern
    if pattern.kind == "every":
        return f"every {duration(pattern.interval_ms)}"
    return f"{pattern.expression} ({pattern.tz or 'UTC'})"


def _to_json(meta: RepeatableMeta, fired: int) -> dict[str, Any]:
    return {
        "key": meta.key,
        "job_name": meta.job_name,
        "pattern": meta.pattern.to_dict(),
        "next_fire_ms": meta.next_fire_ms,
        "next_fire": iso(meta.next_fire_ms),
        "fired": fired,
        "limit": meta.limit,
        "start_after_ms": meta.start_after_ms,
        "end_before_ms": meta.end_before_ms,
        "missed_fires": meta.missed_fires.to_dict(),
    }


@app.command()
def remove(common: CommonOptions, queue: QueueName, key: Key, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Remove a schedule: it will not fire again. Jobs it has already enqueued are kept."""

    async def check(session: Session) -> None:
        await _packed_spec(await session.queue(queue), key)

    async def work(session: Session) -> bool:
        return await (await session.queue(queue)).remove_repeatable_by_key(key)

    common.run(check)
    is_removed = False
    if confirm(f"remove the schedule {key} of {queue} permanently", 1, yes=yes, dry_run=dry_run):
        is_removed = common.run(work)
    if common.as_json:
        write_json({"key": key, "matched": 1, "removed": int(is_removed), "dry_run": dry_run})
    elif is_removed:
        show(f"removed {key}")


@app.command()
def fire(common: CommonOptions, queue: QueueName, key: Key) -> None:
    """Enqueue the job of a schedule once, now. The schedule itself does not change."""

    async def work(session: Session) -> tuple[str, str]:
        found = await session.queue(queue)
        spec = await _spec(found, key)
        codec = queue_codec(queue)
        slot = spec.payload_slot if codec is None else codec.open_slot(spec.payload_slot, spec.job_name)
        job = await found.add(spec.job_name, decode_slot(slot))
        return spec.job_name, job.id

    name, job_id = common.run(work)
    if common.as_json:
        write_json({"key": key, "name": name, "id": job_id})
    else:
        show(f"added {name or 'a job'} {job_id}")


async def _packed_spec(queue: Queue, key: str) -> bytes:
    client = queue.producer.ready_client()
    packed: bytes | None = await client.call("HGET", queue.keys.repeat_spec(key), "spec")
    if packed is None:
        known = [meta.key for meta in await queue.get_repeatable_jobs(10)]
        there = f"existing schedules: {', '.join(known)}" if known else "it has no schedules"
        raise CliError(f"{queue.name} has no schedule {key!r}; {there}")
    return packed


async def _spec(queue: Queue, key: str) -> StoredSpec:
    try:
        spec = decode_spec(await _packed_spec(queue, key))
        spec.payload  # noqa: B018 - decode now, so that an undecodable payload is reported here
    except DecodeError as error:
        raise CliError(f"the schedule {key!r} cannot be fired: {error}") from error
    return spec
