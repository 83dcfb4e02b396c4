"""Default sources of time and random bytes.

All other code takes them as parameters, so that every rule can be tested without sleeping.
"""

from __future__ import annotations

import os
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


def wall_clock_ms() -> int:
    """Return Unix time in whole milliseconds."""
    return time.time_ns() // 1_000_000
