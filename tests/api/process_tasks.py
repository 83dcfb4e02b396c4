"""Tasks that run in separate processes, which find them by the name of this module."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid  # noqa: TC003 - needed at runtime: the annotation selects the encoding
from typing import Any

from tampu import Cancel, EncryptedCodec, Queue, SoftTimeout, UnrecoverableError, current_job

#: The test sets its URL in TAMPU_URL, which child processes inherit.
queue = Queue("processes")


@queue.task(process=True)
def pid_of(number: int, id: uuid.UUID | None = None) -> dict[str, Any]:  # noqa: A002
    return {"pid": os.getpid(), "number": number, "id": None if id is None else id.hex}


@queue.task(process=True)
def own_pid() -> int:
    return os.getpid()


@queue.task(process=True)
async def later(number: int) -> int:
    return number + 1


@queue.task(process=True, timeout=0.5, attempts=1)
def hangs() -> None:
    time.sleep(3600)


@queue.task(process=True, attempts=1)
def dies() -> None:
    os._exit(3)


@queue.task(process=True)
def refuses(how: str) -> Any:
    if how == "raise":
        raise UnrecoverableError("not here")
    return Cancel("not wanted")


@queue.task(process=True)
def tells() -> str:
    job = current_job()
    job.progress(0.5, "half way")
    job.progress(1.0, "there")
    return job.id


class _NotUnpickled:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


@queue.task(process=True)
def unsendable(how: str) -> Any:
    return (lambda: None) if how == "pickled" else _NotUnpickled()


def _kept_its_name(number: int) -> int:
    return 2 * number


doubled = queue.task(process=True, name="doubled")(_kept_its_name)


def _raise_deep_down() -> None:
    raise LookupError("far down")


@queue.task(process=True, attempts=1)
def raises_deep_down() -> None:
    _raise_deep_down()


@queue.task(process=True, attempts=1)
async def raises_deep_down_later() -> None:
    _raise_deep_down()


@queue.task(process=True, soft_timeout=0.2, timeout=30)
def tidies_up() -> str:
    try:
        while True:
            sum(range(1000))
    except SoftTimeout:
        return "tidy"


@queue.task(process=True, soft_timeout=0.05, timeout=10, attempts=1)
def logs_without_end() -> str:
    text = "x" * 4_000_000
    try:
        while True:
            logging.getLogger("endless").warning(text)
    except SoftTimeout:
        return "tidy"


@queue.task(process=True, soft_timeout=0.2, attempts=1)
async def tidies_up_on_a_loop(catches: bool) -> str:
    try:
        await asyncio.sleep(3600)
    except SoftTimeout:
        if not catches:
            raise
    return "tidy"


#: The codec of `sealed_queue`; a child process must not need it.
CODEC = EncryptedCodec({"k": bytes(32)})


def square(number: int) -> int:
    return number * number


def sealed_queue(url: str) -> tuple[Queue, Any]:
    """Return a queue with a codec, and its task that runs in a process."""
    queue = Queue("sealed", url=url, codec=CODEC)
    return queue, queue.task(process=True)(square)


@queue.task(process=True, soft_timeout=0.2)
def quick_pid() -> int:
    return os.getpid()


@queue.task(process=True, attempts=1)
def slow_pid() -> int:
    time.sleep(0.5)
    return os.getpid()
