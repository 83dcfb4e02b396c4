"""Measures seconds, and CPU time of client and server, between a start and a stop."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Process ID of the server; set once by the driver.
server_pid = 0


class Stopwatch:
    """Starts when it is created. `pids` are worker processes that count as the client, with all their children."""

    def __init__(self, pids: list[int] | None = None) -> None:
        self._pids = pids
        self._server_ns = cpu_ns([server_pid]) if server_pid else 0
        self._client_ns = self._client()
        self._began = time.perf_counter()

    def stop(self, jobs: int) -> dict[str, float]:
        """Return `rate` in jobs per second, and `client_us` and `server_us` of CPU time per job."""
        seconds = time.perf_counter() - self._began
        client_ns = self._client() - self._client_ns
        server_ns = (cpu_ns([server_pid]) if server_pid else 0) - self._server_ns
        return {"rate": jobs / seconds, "client_us": client_ns / jobs / 1e3, "server_us": server_ns / jobs / 1e3}

    def _client(self) -> int:
        if self._pids is None:
            return time.process_time_ns()
        return cpu_ns(with_children(self._pids))


def cpu_ns(pids: list[int]) -> int:
    """Return the CPU time that these processes have used, in all threads."""
    return sum(_cpu_ns_of(pid) for pid in pids)


def _cpu_ns_of(pid: int) -> int:
    total = 0
    try:
        # Exact, unlike /proc/PID/stat, which counts in hundredths of a second.
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return total  # the process has ended, or this is not Linux
    return total


def with_children(pids: list[int]) -> list[int]:
    """Return these processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            # The second field is the program's name in parentheses, which can contain anything.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, ahead = [], list(pids)
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        ahead += children.get(pid, [])
    return found


def resident_mb(pids: list[int]) -> float:
    """Return the resident memory of these processes and their children, in megabytes."""
    pages = 0
    for pid in with_children(pids):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
