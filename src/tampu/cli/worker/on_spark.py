"""`tampu worker app:queue --on spark`: checks what can be checked here, then a fleet of workers on executors."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tampu.cli.exits import ERROR, OK, TERMINATED, UsageError
from tampu.cli.worker.apps import load
from tampu.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger("tampu.cli.worker")


def serve_on_spark(
    targets: Sequence[str], settings: Mapping[str, Any], *, master: str | None, slots: int | None
) -> int:
    """Until a signal; the exit code. A wrong target is told before Spark is started."""
    if len(targets) != 1:
        raise UsageError("--on spark serves one target: name a list of queues, app:queues, to serve several")
    found = load(targets)
    if isinstance(found, Worker):
        raise UsageError(f"{targets[0]} is a Worker, which runs here: with --on spark name its Queue")
    Worker(found, **settings)  # wrong settings, and queues without tasks, are told here and not on executors
    from tampu.spark.session import require_spark

    require_spark()
    from tampu.spark.worker import run_on_spark

    for name in ("py4j", "py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # calls cut off by a signal are no news
    log_file = Path(tempfile.gettempdir()) / f"tampu-worker-spark-{os.getpid()}.log"
    logger.info("starting Spark; what it says goes to %s", log_file)
    # Until there is a worker to drain, a signal simply ends it; Java ends with its driver.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    is_well = run_on_spark(targets[0], master=master, slots=slots, settings=settings, log_file=log_file)
    return OK if is_well else ERROR
