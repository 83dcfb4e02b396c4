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
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

from tampu.cli.exits import ERROR, OK, USAGE
from tampu.cli.worker.slot import Slot, exit_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.cli.worker.plan import WorkerPlan

logger = logging.getLogger("tampu.cli.worker")

#: What tells it to stop; the last is the end of the terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How long a process may take beyond its deadline to drain, and to abandon, before it is killed, in seconds.
DRAIN_GRACE_SECS = 15.0
ABANDON_SECS = 5.0
#: How long running jobs may hold up a reload, in seconds.
RELOAD_SECS = 5.0


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
