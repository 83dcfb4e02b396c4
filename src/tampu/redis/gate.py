"""Call the scripts of limited queues: `take.lua`, which delivers their jobs, `mend.lua` and `limit.lua`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tampu.redis.client import Client
    from tampu.redis.connection import Part, Reply
    from tampu.wire.keys import QueueKeys

TAKE = load_script("take")
MEND = load_script("mend")
LIMIT = load_script("limit")
GATE_SCRIPTS = (TAKE, MEND, LIMIT)

#: Maximum number of entries that one call takes: the limit of Lua's `unpack`, with room for other arguments.
MAX_TAKEN = 512
#: Entries that one call indexes.
INDEX = 128
#: Entries, slots, keys and states that one call of `mend` checks.
MEND_PAGE = 128


class Taken(NamedTuple):
    """The reply of one take."""

    entries: list[tuple[bytes, list[bytes]]]
    #: More jobs may run now.
    has_more: bool
    #: When a key or a task has cooled, in ms; None if none cools, or if entries were wanted.
    wait_ms: int | None
    #: More entries are to be indexed.
    is_behind: bool
    #: The last indexed entry.
    seen: bytes


def packed_take(
    keys: QueueKeys,
    *,
    group: str,
    consumer: str,
    want: int,
    index: int = INDEX,
    bell: bytes = b"",
    news: Sequence[Part] = (),
) -> bytes:
    """Return the packed call that takes up to `want` jobs. Its reply goes to `read_taken`.

    `bell` is the entry of the bell that woke the caller. `news` are pairs of a letter and a value: `f` and an entry
    that was settled for good, `r` and one whose job returns, `p` and a state whose limit changed, `h` and a rest.
    """
    return TAKE.packed_call(keys.gate, (group, consumer, min(want, MAX_TAKEN), index, bell, *news))


def read_taken(reply: Reply) -> Taken | None:
    """Return the reply of a take; None if the queue has no limits."""
    if not reply:
        return None
    entries, more, wait, behind, seen = reply
    return Taken(entries, bool(more), int(wait) if wait else None, bool(behind), seen)


async def take_nothing(
    client: Client, keys: QueueKeys, *, group: str, consumer: str, news: Sequence[Part] = ()
) -> Taken | None:
    """Index new entries and wake a worker if jobs may run, but take none."""
    arguments = (group, consumer, 0, INDEX, "", *news)
    return read_taken(await client.run(TAKE, keys.gate, arguments))


#: The cursors of `mend` at the start of each of its five lists.
FIRST_PAGE: tuple[bytes, ...] = (b"",) * 5


async def mend(
    client: Client, keys: QueueKeys, *, group: str, cursors: tuple[bytes, ...] = FIRST_PAGE
) -> tuple[tuple[bytes, ...], int]:
    """Check and repair one page of each list of the gate. Return the cursors of the next pages and the
    number of repairs.

    The cursor behind the last page of a list is that of its first page.
    """
    arguments: tuple[Part, ...] = (group, MEND_PAGE, keys.delayed_index(""), *cursors)
    reply = await client.run(MEND, (*keys.gate, keys.due), arguments)
    return (tuple(reply[:5]), reply[5]) if reply else (FIRST_PAGE, 0)


async def mend_all(client: Client, keys: QueueKeys, *, group: str) -> int:
    """Check and repair the whole gate, page after page. Return the number of repairs."""
    cursors, total, unfinished = FIRST_PAGE, 0, set(range(len(FIRST_PAGE)))
    while unfinished:
        cursors, repaired = await mend(client, keys, group=group, cursors=cursors)
        total += repaired
        unfinished -= {number for number, cursor in enumerate(cursors) if not cursor}
    return total


async def set_limits(client: Client, keys: QueueKeys, limits: Mapping[str, bytes]) -> bool:
    """Change the limits of a queue, by field; an empty one is removed. Without any, remove all.

    Return True if the queue has limits now.
    """
    arguments = [part for pair in limits.items() for part in pair]
    return bool(await client.run(LIMIT, (keys.limits,), arguments))
