"""Default sources of time and random bytes.

All other code takes them as parameters, so that every rule can be tested without sleeping.
"""

from __future__ import annotations

import os
import time

random_bytes = os.urandom


def wall_clock_ms() -> int:
    """Return Unix time in whole milliseconds."""
    return time.time_ns() // 1_000_000
