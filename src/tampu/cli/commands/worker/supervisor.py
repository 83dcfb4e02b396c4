"""The supervisor: keeps N worker processes running, and stops them in order.

| signal | effect |
|---|---|
| first SIGTERM, SIGINT or SIGHUP | drain: take no new jobs, finish and settle the running ones, exit |
| second | abandon the running jobs; other workers retry them when their leases expire |
| third | kill all processes |

A signal within a second of the last one counts as the same. Processes drain on SIGTERM, which may also come from
whatever signals the whole process group; they abandon jobs only on a request over their socket.

Exit codes: 0 if all processes ended cleanly; 1 if jobs were abandoned, a process was killed, or no process could start;
2 if `app:queue` is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from tampu.base.event_loop import SIGNAL_SECS, ignore_signals
from tampu.cli.commands.worker.protocol import ABANDON, ASK_METRICS, Link
from tampu.cli.errors import ERROR, OK, USAGE
from tampu.cli.output import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tampu.cli.commands.worker.protocol import Report, WorkerPlan

logger = logging.getLogger("tampu.cli.worker")

#: Signals that stop it; SIGHUP is sent when the terminal closes.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How long a process may exceed its shutdown deadline, and may take to abandon jobs, before it is killed, in seconds.
#: With the default deadline of 30 s, everything ends before the documented `TimeoutStopSec=40`.
DRAIN_GRACE_SECS = 7.0
ABANDON_SECS = 5.0
#: How long running jobs may delay a reload, in seconds.
RELOAD_SECS = 5.0
#: Sent by the terminal to the whole process group; children ignore them.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
#: Backoff before a dead process is restarted, in seconds: doubles from the first to the last.
FIRST_BACKOFF_SECS = 0.2
LAST_BACKOFF_SECS = 30.0
#: A process that ran this long did not fail at startup, so the backoff is reset.
STEADY_SECS = 60.0
#: How long to wait for a child's metrics, in seconds.
METRICS_SECS = 2.0


class Supervisor:
    """Runs the processes of one `tampu worker`."""

    def __init__(self, plan: WorkerPlan, processes: int, *, reloads: bool = False) -> None:
        self._reloads = reloads
        self.slots = [Slot(number + 1, plan) for number in range(processes)]
        self._signals = 0
        self._signalled_at = float("-inf")
        self._gave_up = False
        self._killers: set[asyncio.Task[None]] = set()

    @property
    def is_stopping(self) -> bool:
        """Return whether it was asked to stop."""
        return self._signals > 0

    async def run(self) -> int:
        """Run until a signal and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            first, *others = self.slots
            keeping = [asyncio.create_task(self._keep(first))]
            # Start one process first: if the app cannot be imported, one error message is enough.
            await first.is_known.wait()
            await asyncio.sleep(0)  # lets it set _gave_up
            if not self._gave_up and not self.is_stopping:
                keeping += [asyncio.create_task(self._keep(slot)) for slot in others]
            codes = await asyncio.gather(*keeping)
        finally:
            for task in self._killers:
                task.cancel()
            ignore_signals(loop, SIGNALS)
        return self._exit_code(codes)

    async def _keep(self, slot: Slot) -> int:
        code = await slot.keep_running(self._has_never_worked, waits_for_change=self._reloads)
        if not self.is_stopping and not self._gave_up:
            # If one process cannot start, the others cannot either: stop all.
            self._gave_up = True
            self._end_all()
        return code

    def _has_never_worked(self) -> bool:
        return not any(slot.has_worked for slot in self.slots)

    def _exit_code(self, codes: list[int]) -> int:
        if USAGE in codes:
            return USAGE
        bad = [code for code in codes if code != OK]
        if bad and not self._gave_up:  # a process that could not start has logged why
            logger.error("worker process %s", exit_text(bad[0]))
        return ERROR if bad or self._gave_up else OK

    # --- stopping

    def stop(self) -> None:
        """Handle a stop signal: the first drains, the second abandons, the third kills."""
        if time.monotonic() < self._signalled_at + SIGNAL_SECS:
            return
        self._signalled_at = time.monotonic()
        self._signals += 1
        if self._signals == 1:
            logger.info("stopping; send a second signal to abandon running jobs")
            self._end_all()
        elif self._signals == 2:
            logger.warning("second signal: abandoning running jobs")
            for slot in self.slots:
                if slot.child is not None:
                    slot.child.abandon()
            self._later(ABANDON_SECS, self._kill_all)
        else:
            self._kill_all()

    def _end_all(self) -> None:
        for slot in self.slots:
            slot.stop()
        reports = [slot.child.report for slot in self.slots if slot.child is not None]
        longest = max((report.deadline_secs for report in reports if report is not None), default=0.0)
        self._later(longest + DRAIN_GRACE_SECS, self._kill_all)

    def _kill_all(self) -> None:
        for slot in self.slots:
            if slot.is_running:
                logger.error(
                    "worker-%d has not stopped in time: killing it; its running jobs are abandoned, and another worker "
                    "will run them again",
                    slot.number,
                )
            slot.signal(signal.SIGKILL)

    def _later(self, secs: float, action: Callable[[], None]) -> None:
        async def act() -> None:
            await asyncio.sleep(secs)
            action()

        task = asyncio.create_task(act())
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    # --- reloading

    def reload(self) -> None:
        """Restart all processes with the current files."""
        if self.is_stopping:
            return
        for slot in self.slots:
            slot.reload()
            if slot.child is not None:
                # During development, do not wait long for a job of the old code.
                self._later(RELOAD_SECS, slot.child.abandon)


class Slot:
    """Keeps one process running until it is stopped."""

    def __init__(self, number: int, plan: WorkerPlan) -> None:
        self.number = number
        self._plan = plan
        self.child: Child | None = None
        self.restarts = 0
        self.last_exit: str | None = None
        #: Set when the app has been imported, or its process has ended.
        self.is_known = asyncio.Event()
        self._is_stopping = False
        self._is_reloading = False
        self._wake = asyncio.Event()

    @property
    def has_worked(self) -> bool:
        """Return whether a process in this slot has ever received an answer from its server."""
        return self.restarts > 0 or (self.child is not None and self.child.has_read)

    async def keep_running(self, gives_up: Callable[[], bool], *, waits_for_change: bool) -> int:
        """Restart the process until `stop`; return the exit code of the last one, or of one that could not start.

        `gives_up` returns whether another start would fail the same way. With `waits_for_change`, the next start then
        waits for a file to change.
        """
        failures = 0
        while True:
            child = await self.start()
            if self._must_stop():
                child.signal(signal.SIGTERM)  # it was started after the others were stopped
            code = await child.run()
            if self._must_stop():
                return code if child.report is not None else 0  # it had not started yet, so no job was affected
            if self._is_reloading:
                self._is_reloading = False
                failures = 0
                continue
            if code >= 0 and gives_up():
                if not waits_for_change:
                    return code or 1
                logger.info("waiting for a file to change")
                await self._pause(None)
                continue
            failures = 0 if time.monotonic() - child.started_at > STEADY_SECS else failures + 1
            wait_secs = min(FIRST_BACKOFF_SECS * 2 ** min(failures, 16), LAST_BACKOFF_SECS)
            self.last_exit = exit_text(code)
            self.restarts += 1
            about = fields(process=self.number, exit_code=code, restarts=self.restarts)
            logger.error("worker-%d %s; restarting in %.1f s", self.number, self.last_exit, wait_secs, extra=about)
            await self._pause(wait_secs)
            if self._must_stop():
                return 0  # no process was running

    async def start(self) -> Child:
        """Start a process."""
        ours, theirs = socket.socketpair()
        with theirs, _held_back(TERMINAL_SIGNALS):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tampu.cli.commands.worker.child"),
                *(msgspec.json.encode(self._plan).decode(), str(theirs.fileno()), str(self.number)),
                pass_fds=(theirs.fileno(),),
            )
        self.child = Child(process, await Link.over(ours), self.is_known)
        return self.child

    def stop(self) -> None:
        """Drain the process; do not restart it."""
        self._is_stopping = True
        self._wake.set()
        self.signal(signal.SIGTERM)

    def reload(self) -> None:
        """Drain the process and restart it."""
        self._is_reloading = self.is_running
        self._wake.set()
        self.signal(signal.SIGTERM)

    @property
    def is_running(self) -> bool:
        """Return whether the process has been started and has not ended."""
        return self.child is not None and self.child.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.child is not None:
            self.child.signal(number)

    def _must_stop(self) -> bool:
        return self._is_stopping

    async def _pause(self, secs: float | None) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), secs)


class Child:
    """A started process."""

    def __init__(self, process: asyncio.subprocess.Process, link: Link, is_known: asyncio.Event) -> None:
        self.process = process
        self.link = link
        self.started_at = time.monotonic()
        self.report: Report | None = None
        self.reported_at = self.started_at
        self.has_read = False
        self._is_known = is_known
        self._metrics: asyncio.Future[str] | None = None

    async def run(self) -> int:
        """Receive its reports until it ends; return its exit code, negative if it was killed by a signal."""
        hearing = asyncio.ensure_future(self._hear())
        try:
            code = await self.process.wait()
        finally:
            self._is_known.set()
            hearing.cancel()
            self.link.close()
        return code

    async def _hear(self) -> None:
        async for report in self.link.reports():
            if report.metrics is not None:
                if self._metrics is not None and not self._metrics.done():
                    self._metrics.set_result(report.metrics)
                continue
            self.report = report
            self.reported_at = time.monotonic()
            self.has_read = self.has_read or report.silent_secs is not None
            self._is_known.set()

    @property
    def silent_secs(self) -> float | None:
        """Return the seconds since it last heard from its server; without reports, this keeps growing."""
        if self.report is None or self.report.silent_secs is None:
            return None
        return self.report.silent_secs + time.monotonic() - self.reported_at

    async def metrics(self) -> str:
        """Return its metrics, or an empty string if it does not answer. Concurrent callers share one request."""
        if self._metrics is None or self._metrics.done():
            self._metrics = asyncio.get_running_loop().create_future()
            self.link.send_line(ASK_METRICS)
        try:
            return await asyncio.wait_for(asyncio.shield(self._metrics), METRICS_SECS)
        except TimeoutError:
            self._metrics.cancel()
            return ""

    def abandon(self) -> None:
        """Ask it to end without its running jobs."""
        self.link.send_line(ABANDON)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still running."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


@contextlib.contextmanager
def _held_back(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Block signals while a process starts: it inherits the mask, so none can arrive before its handlers are set."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # not the previous mask: two slots may be in here


def exit_text(code: int) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
