"""The supervisor: keeps N worker processes running, and ends them in good order.

| signal | what happens |
|---|---|
| first SIGTERM, SIGINT or SIGHUP | all drain: take no more jobs, finish those that run, settle, end |
| second | what still runs is abandoned; its jobs run elsewhere when their leases run out |
| third | all are killed |

Exit code 0 when all ended as they should; 1 when something was abandoned or killed, or no process could start; 2 when
`app:queue` is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from tampu.cli.commands.worker.protocol import ASK_METRICS, Link
from tampu.cli.errors import ERROR, OK, USAGE
from tampu.cli.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tampu.cli.commands.worker.protocol import Report, WorkerPlan

logger = logging.getLogger("tampu.cli.worker")

#: What tells it to stop; the last is the end of the terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How long a process may take beyond its deadline to drain, and to abandon, before it is killed, in seconds.
DRAIN_GRACE_SECS = 15.0
ABANDON_SECS = 5.0
#: How long running jobs may hold up a reload, in seconds.
RELOAD_SECS = 5.0
#: What the terminal sends to the whole process group, and children leave to the supervisor.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
#: Waits before a dead process is replaced, in seconds: doubling from the first to the last.
FIRST_BACKOFF_SECS = 0.2
LAST_BACKOFF_SECS = 30.0
#: A process that ran so long did not die of its start: the waits begin anew.
STEADY_SECS = 60.0
#: How long an answer with metrics may take.
METRICS_SECS = 2.0


class Supervisor:
    """Runs the processes of one `tampu worker`."""

    def __init__(self, plan: WorkerPlan, processes: int, *, reloads: bool = False) -> None:
        self._reloads = reloads
        self.slots = [Slot(number + 1, plan) for number in range(processes)]
        self._signals = 0
        self._gave_up = False
        self._killers: set[asyncio.Task[None]] = set()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._signals > 0

    async def run(self) -> int:
        """Until a signal; the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            first, *others = self.slots
            keeping = [asyncio.create_task(self._keep(first))]
            # The first shows whether the app can be imported at all: N complaints would say no more than one.
            await first.is_known.wait()
            await asyncio.sleep(0)  # lets it give up
            if not self._gave_up and not self.is_stopping:
                keeping += [asyncio.create_task(self._keep(slot)) for slot in others]
            codes = await asyncio.gather(*keeping)
        finally:
            for task in self._killers:
                task.cancel()
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        return self._exit_code(codes)

    async def _keep(self, slot: Slot) -> int:
        code = await slot.keep_running(self._has_never_worked, waits_for_change=self._reloads)
        if not self.is_stopping and not self._gave_up:
            # One that cannot start: the others are of the same making, so all end.
            self._gave_up = True
            self._end_all()
        return code

    def _has_never_worked(self) -> bool:
        return not any(slot.has_worked for slot in self.slots)

    def _exit_code(self, codes: list[int]) -> int:
        if USAGE in codes:
            return USAGE
        bad = [code for code in codes if code != OK]
        if bad and not self._gave_up:  # who could not start has said why
            logger.error("a worker %s", exit_text(bad[0]))
        return ERROR if bad or self._gave_up else OK

    # --- stopping

    def stop(self) -> None:
        """What a signal does: the first drains, the second abandons, the third kills."""
        self._signals += 1
        if self._signals == 1:
            logger.info("draining; a second signal abandons the jobs that still run")
            self._end_all()
        elif self._signals == 2:
            logger.warning("abandoning the jobs that still run")
            self._end_all(within_secs=ABANDON_SECS)
        else:
            self._kill_all()

    def _end_all(self, within_secs: float | None = None) -> None:
        for slot in self.slots:
            slot.stop()
        if within_secs is None:
            reports = [slot.child.report for slot in self.slots if slot.child is not None]
            longest = max((report.deadline_secs for report in reports if report is not None), default=0.0)
            within_secs = longest + DRAIN_GRACE_SECS
        self._later(within_secs, self._kill_all)

    def _kill_all(self) -> None:
        for slot in self.slots:
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
        """Have all processes start anew, with the files as they are now."""
        if self.is_stopping:
            return
        for slot in self.slots:
            slot.reload()
            child = slot.child
            if child is not None:
                # Whoever edits a file does not want to wait for a long job of the old one.
                self._later(RELOAD_SECS, partial(child.signal, signal.SIGTERM))


class Slot:
    """Keeps one process running until it is told to stop."""

    def __init__(self, number: int, plan: WorkerPlan) -> None:
        self.number = number
        self._plan = plan
        self.child: Child | None = None
        self.restarts = 0
        self.last_exit: str | None = None
        #: Set when the app is imported, or its process has ended before.
        self.is_known = asyncio.Event()
        self._is_stopping = False
        self._is_reloading = False
        self._wake = asyncio.Event()

    @property
    def has_worked(self) -> bool:
        """Whether a process here has ever heard from its server."""
        return self.restarts > 0 or (self.child is not None and self.child.has_read)

    async def keep_running(self, gives_up: Callable[[], bool], *, waits_for_change: bool) -> int:
        """Until `stop`: the exit code of the last process, or of one that could not even start.

        `gives_up` says whether another try would only end the same way; with `waits_for_change` the next one comes when
        a file has changed.
        """
        failures = 0
        while True:
            child = await self.start()
            if self._must_stop():
                child.signal(signal.SIGTERM)  # it was started after the others were told
            code = await child.run()
            if self._must_stop():
                return code if child.report is not None else 0  # one that did not even start has lost nothing
            if self._is_reloading:
                self._is_reloading = False
                failures = 0
                continue
            if code >= 0 and gives_up():
                if not waits_for_change:
                    return code or 1
                logger.info("waiting for a change of the files")
                await self._pause(None)
                continue
            failures = 0 if time.monotonic() - child.started_at > STEADY_SECS else failures + 1
            wait_secs = min(FIRST_BACKOFF_SECS * 2 ** min(failures, 16), LAST_BACKOFF_SECS)
            self.last_exit = exit_text(code)
            self.restarts += 1
            about = fields(process=self.number, exit_code=code, restarts=self.restarts)
            logger.error("worker-%d %s; another starts in %.1f s", self.number, self.last_exit, wait_secs, extra=about)
            await self._pause(wait_secs)
            if self._must_stop():
                return 0  # nothing was running that could have gone wrong

    async def start(self) -> Child:
        """Start a process."""
        ours, theirs = socket.socketpair()
        with theirs, _held_back(TERMINAL_SIGNALS):
            process = await asyncio.create_subprocess_exec(
                # -P: see tampu.base.shadowing.
                *(sys.executable, "-P", "-m", "tampu.cli.commands.worker.child"),
                *(self._plan.to_argument(), str(theirs.fileno()), str(self.number)),
                pass_fds=(theirs.fileno(),),
            )
        self.child = Child(process, await Link.over(ours), self.is_known)
        return self.child

    def stop(self) -> None:
        """Have it drain, or abandon when it drains already; nothing is started any more."""
        self._is_stopping = True
        self._wake.set()
        self.signal(signal.SIGTERM)

    def reload(self) -> None:
        """Have it drain and start anew."""
        self._is_reloading = self.child is not None and self.child.process.returncode is None
        self._wake.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        if self.child is not None and self.child.process.returncode is None:
            self.child.signal(number)

    def _must_stop(self) -> bool:
        return self._is_stopping

    async def _pause(self, secs: float | None) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), secs)


class Child:
    """A process that was started."""

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
        """Hear its reports until it ends; its exit code, below 0 for a signal."""
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
        """How long ago it last heard from its server; a process that reports nothing hears nothing."""
        if self.report is None or self.report.silent_secs is None:
            return None
        return self.report.silent_secs + time.monotonic() - self.reported_at

    async def metrics(self) -> str:
        """Its metrics; empty when it does not answer. Who asks while another waits gets the same answer."""
        if self._metrics is None or self._metrics.done():
            self._metrics = asyncio.get_running_loop().create_future()
            self.link.send_line(ASK_METRICS)
        try:
            return await asyncio.wait_for(asyncio.shield(self._metrics), METRICS_SECS)
        except TimeoutError:
            self._metrics.cancel()
            return ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


@contextlib.contextmanager
def _held_back(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Signals wait meanwhile. A process started now inherits that, and so is not hit before it can say what to do."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # not as before: two slots may be in here


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
