"""Counts jobs across worker processes through a memory-mapped file, in which each process has its own counter.

Peers whose worker is a separate program call `tick()` in their handlers; the driver reads the sum.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.program.stopwatch import Stopwatch, cpu_ns, with_children

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "BENCH_COUNTER"
SLOTS = 4096
#: How long a worker may take for all jobs, in seconds.
PATIENCE_SECS = 30.0

_count = 0
_lock = threading.Lock()
_slot: tuple[mmap.mmap, int, int] | None = None


def tick() -> None:
    """Count one job as done in this process."""
    global _count, _slot
    with _lock:
        if _slot is None or _slot[2] != os.getpid():
            with open(os.environ[VARIABLE], "r+b") as file:
                _slot = (mmap.mmap(file.fileno(), SLOTS * 8), os.getpid() % SLOTS * 8, os.getpid())
            _count = 0
        _count += 1
        struct.pack_into("q", _slot[0], _slot[1], _count)


@contextlib.contextmanager
def counting() -> Iterator[mmap.mmap]:
    """Create a file for the counts, and name it in the environment of child processes."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(prefix="bench-", dir=shared) as file:
        file.truncate(SLOTS * 8)
        os.environ[VARIABLE] = file.name
        with mmap.mmap(file.fileno(), SLOTS * 8) as counts:
            yield counts


def total_of(counts: mmap.mmap) -> int:
    return sum(struct.unpack(f"{SLOTS}q", counts[:]))


def drained_by(command: list[str], total: int, cwd: str | None = None) -> dict[str, float]:
    """Start a worker program and time it from its first job to its last, so that its startup does not count."""
    with counting() as counts, running(command, cwd) as worker:
        deadline = time.monotonic() + PATIENCE_SECS
        while not (before := total_of(counts)):
            _check(worker, deadline, command)
            time.sleep(0.0005)
        watch = Stopwatch([worker.pid])
        while total_of(counts) < total:
            _check(worker, deadline, command)
            time.sleep(0.001)
        return watch.stop(max(total - before, 1))


def first_job_of(command: list[str]) -> dict[str, float]:
    """Start a worker program and measure until its first job has run: `first_job_ms`, and its CPU time, `cpu_ms`."""
    with counting() as counts:
        began = time.perf_counter()
        with running(command) as worker:
            deadline = time.monotonic() + PATIENCE_SECS
            while not total_of(counts):
                _check(worker, deadline, command)
                time.sleep(0.001)
            took_ms = (time.perf_counter() - began) * 1e3
            return {"first_job_ms": took_ms, "cpu_ms": cpu_ns(with_children([worker.pid])) / 1e6}


def _check(worker: subprocess.Popen[bytes], deadline: float, command: list[str]) -> None:
    if worker.poll() is not None:
        raise RuntimeError(f"the worker exited with code {worker.returncode}: {' '.join(command[:4])}")
    if time.monotonic() > deadline:
        raise TimeoutError(f"not done within {PATIENCE_SECS:g} s: {' '.join(command[:4])}")


@contextlib.contextmanager
def running(command: list[str], cwd: str | None = None) -> Iterator[Any]:
    """Run a worker program in its own session, and kill it with all its children at the end."""
    with tempfile.TemporaryFile() as log:
        worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=cwd)
        try:
            yield worker
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)


def script_of(name: str) -> str:
    """Return the path of a program that pip installed next to this Python."""
    return str(Path(sys.executable).with_name(name))
