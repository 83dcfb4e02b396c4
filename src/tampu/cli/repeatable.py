"""`tampu repeatable list|remove|fire`: jobs that recur."""

from typing import Annotated, Any

import typer

from tampu.cli.confirm import may_go_on
from tampu.cli.exits import CliError
from tampu.cli.fitting import FittingTable
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, DryRun, QueueName, Timeout, Url, Yes
from tampu.cli.output import cell, say, show, write_json
from tampu.cli.session import Session, run, server_now_ms
from tampu.cli.units import duration, instant, iso, plural
from tampu.errors import DecodeError
from tampu.queue import Queue
from tampu.wire.repeat import RepeatableMeta, StoredSpec
from tampu.wire.stored_spec import decode_spec

app = typer.Typer(help="Jobs that recur: list them, remove them, fire one now.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The key it is registered under, as `list` shows it.")]


@app.command("list")
def list_(
    queue: QueueName,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the next to fire first.")] = 100,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """List the jobs that recur, the next to fire first."""
    found, fired, now_ms, total = run(_list(url, timeout, queue, limit))
    if as_json:
        write_json([_to_json(meta, count) for meta, count in zip(found, fired, strict=True)])
        return
    if not found:
        say(f"{queue} has no repeatable jobs" + (f" that can be read, of {total:,}" if total else ""))
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
        say(f"{plural(total - len(found), 'more')} beyond --limit, or not readable")


async def _list(
    url: str | None, timeout_secs: float, name: str, limit: int
) -> tuple[list[RepeatableMeta], list[int], int, int]:
    async with Session(url, timeout_secs) as session:
        queue = await session.queue(name)
        pipe, keys = queue.producer.ready_pipe(), queue.keys
        found = await queue.get_repeatable_jobs(limit)
        counts = await pipe.call_many([("HGET", keys.repeat_spec(meta.key), "fired") for meta in found])
        fired = [int(count) if count and count.isdigit() else 0 for count in counts]
        return found, fired, await server_now_ms(pipe), int(await pipe.call("ZCARD", keys.repeat))


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
def remove(
    queue: QueueName,
    key: Key,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Remove a job that recurs: it fires no more. Fires that wait already stay."""

    async def work(*, really: bool) -> bool:
        async with Session(url, timeout) as session:
            found = await session.queue(queue)
            if really:
                return await found.remove_repeatable_by_key(key)
            await _packed_spec(found, key)
            return True

    run(work(really=False))
    is_removed = False
    if may_go_on(f"remove the repeatable {key} of {queue} for good", 1, yes=yes, dry_run=dry_run):
        is_removed = run(work(really=True))
    if as_json:
        write_json({"key": key, "matched": 1, "removed": int(is_removed), "dry_run": dry_run})
    elif is_removed:
        show(f"removed {key}")


@app.command()
def fire(
    queue: QueueName,
    key: Key,
    as_json: AsJson = False,
    url: Url = None,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
) -> None:
    """Add the job of a repeatable once, now; its schedule stays as it is."""

    async def work() -> tuple[str, str]:
        async with Session(url, timeout) as session:
            found = await session.queue(queue)
            spec = await _spec(found, key)
            job = await found.add(spec.job_name, spec.payload)
            return spec.job_name, job.id

    name, job_id = run(work())
    if as_json:
        write_json({"key": key, "name": name, "id": job_id})
    else:
        show(f"added {name or 'a job'} {job_id}")


async def _packed_spec(queue: Queue, key: str) -> bytes:
    pipe = queue.producer.ready_pipe()
    packed: bytes | None = await pipe.call("HGET", queue.keys.repeat_spec(key), "spec")
    if packed is None:
        known = [meta.key for meta in await queue.get_repeatable_jobs(10)]
        there = f"there are: {', '.join(known)}" if known else "it has none"
        raise CliError(f"{queue.name} has no repeatable {key!r}; {there}")
    return packed


async def _spec(queue: Queue, key: str) -> StoredSpec:
    try:
        spec = decode_spec(await _packed_spec(queue, key))
        spec.payload  # noqa: B018 - read now, to say so in one line if it cannot be
    except DecodeError as error:
        raise CliError(f"the repeatable {key!r} cannot be fired: {error}") from error
    return spec
