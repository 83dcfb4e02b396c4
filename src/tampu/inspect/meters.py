"""Reads what workers counted: the line of a queue's last hour, and its tasks by minute or by ten minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tampu.errors import ConfigError
from tampu.wire.meter import MINUTES, TENS, Minute, decode_cell, decode_line, merge

if TYPE_CHECKING:
    from tampu.redis.client import Client
    from tampu.wire.keys import QueueKeys
    from tampu.wire.meter import Counts

#: Cells are written up to 10 s late, and folded 15 s after the end of their minute; a fold may take a moment.
LATE_MS = 25_000
#: The longest time that a series covers, in seconds.
MAX_SECS = TENS * 600


def meter_key(keys: QueueKeys, minute: int | None = None) -> str:
    """Return the key of a queue's series, or of the cells of one minute."""
    return f"{keys.tag}:meter" + ("" if minute is None else f":{minute}")


def last_minute(now_ms: int) -> int:
    """Return the last minute that is complete, in minutes since the epoch."""
    return (now_ms - LATE_MS) // 60_000 - 1


def line_of(packed: bytes | None, now_ms: int) -> list[Minute]:
    """Return the last 60 complete minutes; those that nobody wrote are empty."""
    known, last = decode_line(packed), last_minute(now_ms)
    return [known.get(at, Minute(at)) for at in range(last - MINUTES + 1, last + 1)]


class Series(NamedTuple):
    """What workers counted over a time, in steps of one minute or ten minutes."""

    #: Minutes of one step.
    step: int
    #: Start of each step, in minutes since the epoch, and what was counted in it: counts by task.
    starts: list[int]
    cells: list[dict[str, Counts]]
    #: The last 60 minutes with the state of the queue.
    line: list[Minute]

    @property
    def tasks(self) -> dict[str, Counts]:
        """Return the counts of each task over the whole time."""
        return merge(self.cells)


async def read_series(client: Client, keys: QueueKeys, now_ms: int, secs: float = 3600.0) -> Series:
    """Return the series of a queue: up to an hour by minute, up to 24 hours by ten minutes."""
    if not 60 <= secs <= MAX_SECS:
        raise ConfigError(f"the time must be between 1m and 24h, which workers keep counts for; got {secs:g} s")
    last = last_minute(now_ms)
    step = 1 if secs <= MINUTES * 60 else 10
    count = int(-(-secs // (step * 60)))
    starts = [(last // step - back) * step for back in range(count - 1, -1, -1)]
    fields = [f"{'m' if step == 1 else 't'}{start // step}" for start in starts]
    line, *packed = await client.call("HMGET", meter_key(keys), "line", *fields)
    return Series(step, starts, [decode_cell(one) for one in packed], line_of(line, now_ms))


def task_json(counts: Counts) -> dict[str, float | None]:
    """Return the counts of a task for a program."""
    succeeded, retried, dead, cancelled = counts.kinds
    return {
        "runs": counts.total,
        "succeeded": succeeded,
        "retried": retried,
        "dead": dead,
        "cancelled": cancelled,
        "run_p50_ms": counts.run_ms(0.5),
        "run_p95_ms": counts.run_ms(0.95),
        "run_p99_ms": counts.run_ms(0.99),
        "wait_p95_ms": counts.wait_ms(0.95),
    }
