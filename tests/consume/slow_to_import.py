"""A handler whose module takes longer to import than its jobs may take to run."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tampu.wire.job import Job

if multiprocessing.parent_process() is not None:
    time.sleep(1.5)


def handler(job: Job[Any]) -> bytes:
    return b"in time"
