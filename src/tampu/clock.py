"""Where time and randomness come from when the caller brings none of its own.

Everything below and above takes them as parameters, so that every rule can be tested without sleeping.
"""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Unix time in whole milliseconds."""
    return time.time_ns() // 1_000_000
