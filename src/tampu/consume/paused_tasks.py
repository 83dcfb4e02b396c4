"""Puts jobs of paused tasks back: a stream cannot be read selectively, so workers receive them anyway."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

from tampu.inspect.pauses import decode_pauses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tampu.inspect.pauses import TaskPause

logger = logging.getLogger("tampu.worker")

#: A job of a paused task is put back for a quarter of the time since the pause began, within these bounds. Each time
#: writes two events, so a long pause must not put all its jobs back once a second.
FIRST_DELAY_MS = 1000
LONGEST_DELAY_MS = 60_000


class PausedTasks:
    """The paused tasks of one queue, as of the worker's last check."""

    def __init__(self, queue_name: str, random_below: Callable[[int], int] = random.randrange) -> None:
        self._queue = queue_name
        self._random_below = random_below
        #: By name; the same dict all the time, which is empty nearly always.
        self.pauses: dict[str, TaskPause] = {}
        self._looked_at_ms = 0

    def learn(self, flat: Sequence[bytes], now_ms: int) -> None:
        """Note which tasks are paused at this time of the server's clock."""
        if not flat and not self.pauses:
            return
        found = {name: one for name, one in decode_pauses(flat).items() if not one.is_over(now_ms)}
        for name in found.keys() - self.pauses.keys():
            reason = f": {found[name].reason}" if found[name].reason else ""
            logger.info('queue "%s": task %s paused%s', self._queue, name, reason)
        for name in self.pauses.keys() - found.keys():
            logger.info('queue "%s": task %s resumed', self._queue, name)
        self.pauses.clear()
        self.pauses.update(found)
        self._looked_at_ms = now_ms

    def delay_ms(self, name: str) -> int:
        """Return for how long to put back a job of a paused task."""
        paused_ms = self._looked_at_ms - self.pauses[name].since_ms
        delay_ms = min(max(paused_ms // 4, FIRST_DELAY_MS), LONGEST_DELAY_MS)
        # Spread out, so that they do not all come back at the same moment.
        return delay_ms - self._random_below(delay_ms // 4)
