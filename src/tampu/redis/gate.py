"""Call the scripts of limited queues: `take.lua`, which delivers their jobs, `mend.lua` and `limit.lua`.

`keys` are the KEYS of these scripts, in the order of `lua/lib/gate.lua`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tampu.redis.scripts import Script, load_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tampu.redis.client import Client
    from tampu.redis.connection import Part, Reply

TAKE = load_script("take")
#: Its form for servers with script flags: above maxmemory, a queue can still be drained, which frees memory.
TAKE_UNDER_OOM = Script("take", "#!lua flags=allow-oom\n" + TAKE.text)
MEND = load_script("mend")
LIMIT = load_script("limit")
GATE_SCRIPTS = (TAKE, MEND, LIMIT)

#: Maximum number of entries that one call takes: the limit of Lua's `unpack`, with room for other arguments.
MAX_TAKEN = 512
#: Entries that one call indexes.
INDEX = 256
#: Entries, slots, keys and states that one call of `mend` checks.
MEND_PAGE = 128


class Taken(NamedTuple):
    """The reply of one take."""

    entries: list[tuple[bytes, list[bytes]]]
    #: More jobs may run now.
    has_more: bool
    #: When a key or a task has cooled, in ms; None if none cools, or if more jobs may run now.
    wait_ms: int | None
    #: More entries are to be indexed.
    is_behind: bool
    #: The last indexed entry.
    seen: bytes


def packed_take(
    keys: Sequence[str],
    *,
    group: str,
    consumer: str,
    want: int,
    index: int = INDEX,
    bell: bytes = b"",
    news: Sequence[Part] = (),
    script: Script = TAKE,
) -> bytes:
    """Return the packed call that takes up to `want` jobs. Its reply goes to `read_taken`.

    `bell` is the entry of the bell that woke the caller. `news` are pairs of a letter and a value: `f` and an entry
    that was settled for good, `r` and one whose job returns, `p` and a state whose limit changed, `h` and a rest.
    """
    return script.packed_call(keys, (group, consumer, min(want, MAX_TAKEN), index, bell, *news))


def read_taken(reply: Reply) -> Taken | None:
    """Return the reply of a take; None if the queue has no limits."""
    if not reply:
        return None
    entries, more, wait, behind, seen = reply
    return Taken(entries, bool(more), int(wait) if wait else None, bool(behind), seen)


async def take_nothing(
    client: Client, keys: Sequence[str], *, group: str, consumer: str, news: Sequence[Part] = ()
) -> Taken | None:
    """Index new entries and wake a worker if jobs may run, but take none."""
    arguments = (group, consumer, 0, INDEX, "", *news)
    return read_taken(await client.run(TAKE, keys, arguments))


#: The cursors of `mend` at the start of each of its five lists.
FIRST_PAGE: tuple[bytes, ...] = (b"",) * 5


async def mend(
    client: Client,
    keys: Sequence[str],
    due: str,
    *,
    group: str,
    index_prefix: str,
    cursors: tuple[bytes, ...] = FIRST_PAGE,
) -> tuple[tuple[bytes, ...], int]:
    """Check and repair one page of each list. Return the cursors of the next pages, and the number of repairs.

    The cursor behind the last page of a list is that of its first page.
    """
    arguments: tuple[Part, ...] = (group, MEND_PAGE, index_prefix, *cursors)
    reply = await client.run(MEND, (*keys, due), arguments)
    return (tuple(reply[:5]), reply[5]) if reply else (FIRST_PAGE, 0)


async def mend_all(client: Client, keys: Sequence[str], due: str, *, group: str, index_prefix: str) -> int:
    """Check and repair the whole gate, page after page. Return the number of repairs."""
    cursors, total, unfinished = FIRST_PAGE, 0, set(range(len(FIRST_PAGE)))
    while unfinished:
        cursors, repaired = await mend(client, keys, due, group=group, index_prefix=index_prefix, cursors=cursors)
        total += repaired
        unfinished -= {number for number, cursor in enumerate(cursors) if not cursor}
    return total


async def set_limits(
    client: Client, keys: Sequence[str], due: str, *, index_prefix: str, limits: Mapping[str, bytes]
) -> None:
    """Change the limits of a queue, by field, and apply them. An empty limit is removed; without any, all are.

    The scripts are loaded here: connections of producers do without them.
    """
    hash_of_limits = keys[7]
    for script in GATE_SCRIPTS:
        await client.call("SCRIPT", "LOAD", script.text)
    was_limited = await client.call("EXISTS", hash_of_limits)
    await client.run(LIMIT, (hash_of_limits,), [part for pair in limits.items() for part in pair])
    group = await _group_of(client, keys[0])
    if group is None:
        return  # the first take of a worker applies them
    own = [field for field in limits if field[:1] in (":", ";")]
    news = [part for field in own for part in ("p", field)]
    await take_nothing(client, keys, group=group, consumer="", news=news)
    if limits and not (was_limited and len(own) == len(limits)):
        await mend_all(client, keys, due, group=group, index_prefix=index_prefix)


async def _group_of(client: Client, stream: str) -> str | None:
    """Return the group of the workers: the only one, or that with the default name. None before the first worker."""
    if not await client.call("EXISTS", stream):
        return None
    groups = await client.call("XINFO", "GROUPS", stream)
    names = [dict(zip(group[::2], group[1::2], strict=True))[b"name"].decode() for group in groups]
    return "default" if "default" in names else next(iter(names), None)
