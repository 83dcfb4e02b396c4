"""Default sources of time and random bytes.

All other code takes them as parameters, so that every rule can be tested without sleeping.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

random_bytes = os.urandom

#: Nanoseconds since some moment in the past. Where the system has such a clock, it counts the time that the machine was
#: suspended: a lease does not wait for this machine to wake up.
boot_clock_ns: Callable[[], int] = (
    partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.perf_counter_ns
)


#: Offset of this process's rounds, as a share of their interval. It is random, so that processes do not run in step.
_PHASE = random.random()


def secs_until_round(interval_secs: float, now: float | None = None) -> float:
    """Return the seconds until the next round of loops with this interval; `now` is a monotonic time.

    The rounds of all loops with the same interval begin together, so that their requests to a server are sent together.
    """
    since = (time.monotonic() if now is None else now) + _PHASE * interval_secs
    left = interval_secs - since % interval_secs
    return left if left > interval_secs / 100 else left + interval_secs  # the timer ended just before its round


def wall_clock_ms() -> int:
    """Return Unix time in whole milliseconds."""
    return time.time_ns() // 1_000_000
