"""The checker: finds every broken promise in a history. Pure: no clock, no server, no files.

| rule         | promise                                                                                              |
|--------------|------------------------------------------------------------------------------------------------------|
| `missing`    | a confirmed job ran to its end or is a dead letter; nothing is left on the server                    |
| `unfinished` | no job was acknowledged without having finished                                                      |
| `rerun`      | an attempt starts twice only with a cause: its worker died, lost its lease or was stopped during an  |
|              | outage, or the server failed over                                                                    |
| `attempts`   | only a failure uses up an attempt; no job runs more often than promised                              |
| `dead`       | a dead letter had used up its attempts, had started its last one, or had killed too many workers     |
| `invented`   | no job runs that was not added, or whose add was rejected                                            |
| `schedule`   | a schedule fired once per due time                                                                   |
| `unique`     | an explicit ID was added once                                                                        |
| `result`     | a finished job's result is stored                                                                    |
| `cancelled`  | a cancelled job did not start; nor did one whose cancel was requested, from two seconds later on     |
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaos.records import NEVER, Asked, Fault, History, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: How long an outcome may take to be written while the server answers, on a busy machine, in seconds.
SETTLE_SECS = 2.0
#: How long a worker may take to reconnect after an outage, in seconds.
RECONNECT_SECS = 3.0
#: How long after a stall a job may start that the worker had checked before the stall, in seconds.
LATE_START_SECS = 0.2
#: The start of a last attempt is recorded just before the handler's first line. For every this many worker deaths, one
#: may fall into that gap and leave a dead letter of a job that had not started.
DEATHS_PER_MOMENT = 25
#: Deaths after which a job that never fails is a dead letter, and deaths beyond its attempts: `consume/inflight.py`.
MAX_DEATHS = 6
LONE_DEATHS = 3

#: How long a worker may take to learn of a requested cancel, in seconds: two are promised, and the machine is busy.
CANCEL_SECS = 4.0

#: Faults after which a job of the process may start again: it died, or its lease ran out. See also `_Judge`.
EXCUSES = frozenset({"death", "stop", "partition", "stalled", "fds", "failover"})
#: Faults in which outcomes cannot be written, or only slowly; they excuse no second start.
OUTAGES = frozenset(
    "server-kill server-stop client-kill client-pause busy oom script-flush slot-move clock-forward clock-back "
    "cut delay throttle half-close blackhole".split()
) | {"stop", "partition", "stalled", "fds", "failover"}


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    rule: str
    token: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: job {self.token}: {self.text}"


def check(history: History) -> list[Violation]:
    """Return all violations in a history. An empty list means that every promise was kept."""
    judge = _Judge(history)
    return [
        *judge.jobs(),
        *judge.schedules(),
        *judge.unique_ids(),
        *judge.cancellations(),
    ]


class _Judge:
    def __init__(self, history: History) -> None:
        self._history = history
        self._causes: dict[str, list[Fault]] = defaultdict(list)
        self._outages: dict[str, list[Fault]] = defaultdict(list)
        for fault in history.faults:
            if fault.kind == "failover":
                # It begins with the last write that the new master has: earlier writes are not lost (`failovers.py`). A
                # worker finds out at its next renewal which of its entries the new master does not know as its own.
                until = fault.end + (RECONNECT_SECS + history.lease_secs / 3) * 1e9
                self._causes[fault.target].append(Fault(fault.kind, fault.target, fault.begin, until))
            elif fault.kind in EXCUSES and self._is_long_enough(fault):
                self._causes[fault.target].append(fault)
            if fault.kind in OUTAGES:
                self._outages[fault.target].append(fault)
        for fault in history.faults:
            # A stopped worker gives up at its deadline: jobs whose outcomes it could not write by then run again.
            for outage in (*self._outages.get("*", ()), *self._outages.get(fault.target, ())):
                if fault.kind in ("term", "roll") and outage.begin <= fault.end <= outage.end:
                    self._causes[fault.target].append(Fault("term", fault.target, outage.begin, fault.end))
            # Leases and heartbeats that are evicted while workers cannot renew them for longer than a lease: nothing is
            # left that tells a live one from a dead one. Alone, neither excuses a second start.
            for outage in self._outages.get("*", ()):
                is_long = outage.end - outage.begin >= history.lease_secs * 1e9
                back_by = outage.end + RECONNECT_SECS * 1e9
                if fault.kind == "evict" and is_long and outage.begin <= fault.end and fault.begin <= back_by:
                    self._causes["*"].append(Fault("evict", "*", outage.begin, min(fault.end, back_by)))
        for process, at in history.deaths.items():
            self._causes[process].append(Fault("death", process, at, at))
        for causes in self._causes.values():
            causes.sort(key=lambda fault: fault.begin)
        self._failovers = [fault for fault in history.faults if fault.kind == "failover"]
        self._spent: set[int] = set()
        #: Number of dead letters of jobs that had not started that are still allowed.
        self._moments = max(len(history.deaths) // DEATHS_PER_MOMENT, 1) if history.deaths else 0
        self._scheduled = {schedule.spec for schedule in history.schedules}

    def _is_long_enough(self, fault: Fault) -> bool:
        """Return False for a stall of less than half a lease: the worker has lost nothing."""
        return fault.kind != "stalled" or fault.end - fault.begin >= self._history.lease_secs * 0.5e9

    # --- jobs

    def jobs(self) -> Iterator[Violation]:
        history = self._history
        for token, asked in history.asked.items():
            runs = history.runs.get(token, ())
            if len(runs) == 1 and runs[0].outcome == "ok" and token not in history.dead and asked.do == "ok":
                if asked.answer == "refused" or runs[0].attempt:  # the common case, decided quickly
                    yield from self._job(asked, runs)
                continue
            yield from self._job(asked, runs)
        for token, runs in history.runs.items():
            if token in history.asked:
                continue
            if token.partition("@")[0] in self._scheduled:
                yield from self._job(Asked(token, answer="ok"), runs)
            else:
                yield Violation("invented", token, f"it ran in {runs[0].process}, and no producer asked for it")
        for process, token in history.strays:
            yield Violation("invented", token, f"it ended in a process of {process} in which it had not begun")
        for token, where in history.left.items():
            yield Violation("missing", token, f"it is still in {where} after the queue was drained")

    def _job(self, asked: Asked, runs: Iterable[Run]) -> Iterator[Violation]:
        runs = list(runs)
        yield from self._finished(asked, runs)
        yield from self._invented(asked, runs)
        yield from self._starts(asked, runs)
        yield from self._dead(asked, runs)
        yield from self._results(asked, runs)

    def _finished(self, asked: Asked, runs: list[Run]) -> Iterator[Violation]:
        token, history = asked.token, self._history
        is_done = any(run.outcome == "ok" for run in runs) or token in history.dead or token in history.left
        if is_done or token in history.cancels:
            return
        if runs and self._is_lost_with_its_master(asked, runs[0]):
            return
        if runs:
            last = runs[-1]
            how = "failed" if last.outcome else "was cut short in"
            where = f"attempt {last.attempt} in {last.process}"
            yield Violation("unfinished", token, f"it {how} {where} and is gone from the server")
        elif asked.answer == "ok":
            yield Violation("missing", token, "its add was confirmed, it never ran and is gone from the server")

    def _invented(self, asked: Asked, runs: list[Run]) -> Iterator[Violation]:
        if runs and asked.answer in ("refused", "known"):
            yield Violation("invented", asked.token, f"it ran although its add was answered with {asked.answer!r}")

    def _starts(self, asked: Asked, runs: list[Run]) -> Iterator[Violation]:
        token = asked.token
        # The failures of a task that runs in its own process are not all recorded: it is killed with its handler.
        is_silent = asked.do.startswith("process")
        latest: dict[int, Run] = {}
        failed_at: dict[int, float] = {}
        for run in runs:
            if run.outcome == "fail":
                failed_at[run.attempt] = min(run.end, failed_at.get(run.attempt, NEVER))
        for run in runs:
            before = latest.get(run.attempt)
            latest[run.attempt] = run
            if before is not None:
                if not self._excused(before, run):
                    yield Violation("rerun", token, f"{_shown(before)} and {_shown(run)}, without a cause")
            elif run.attempt and not is_silent and failed_at.get(run.attempt - 1, NEVER) > run.start:
                text = f"{_shown(run)}, and attempt {run.attempt - 1} had not failed"
                yield Violation("attempts", token, text)
            if run.attempt >= asked.attempts:
                yield Violation("attempts", token, f"{_shown(run)}, and it has {asked.attempts} attempts")
            if run.end == NEVER and not is_silent and run.process not in self._history.deaths:
                yield Violation("unfinished", token, f"{_shown(run)} and never ended, although {run.process} lived")
        most = min(MAX_DEATHS, asked.attempts + self._history.extra_runs) if asked.attempts > 1 else 1
        if asked.do == "die" and runs:
            most += MAX_DEATHS * self._failovers_between(runs[0].start, runs[-1].start)
        if asked.do == "die" and len(runs) > most:
            yield Violation("attempts", token, f"it killed {len(runs)} workers, and at most {most} are promised")

    def _dead(self, asked: Asked, runs: list[Run]) -> Iterator[Violation]:
        token = asked.token
        letters = self._history.dead.get(token, ())
        if len(letters) > 1 and not any(self._excused(run, None) for run in runs):
            yield Violation("dead", token, f"it was dead-lettered {len(letters)} times")
        for letter in letters[:1]:
            last = asked.attempts - 1
            is_silent = asked.do.startswith("process")
            finals = [run for run in runs if run.attempt == last]
            cut = [run for run in runs if run.outcome == "" or self._excused(run, None)]
            left = asked.attempts - max((run.attempt for run in runs), default=0)
            if not runs and letter.error_type == "WorkerLost" and asked.attempts == 1 and self._moments:
                self._moments -= 1
            elif not runs and not is_silent:
                yield Violation("dead", token, f"it was dead-lettered ({letter.error_type}) and had never started")
            elif letter.error_type == "WorkerLost" and not is_silent:
                had_begun = any(run in cut for run in finals)
                lost = len(cut) + (self._deaths_elsewhere(runs) if asked.do == "die" else 0)
                if not had_begun and lost < min(MAX_DEATHS, left + LONE_DEATHS):
                    yield Violation("dead", token, f"WorkerLost after {len(cut)} of its workers were lost")
            elif letter.reason == "unrecoverable":
                if asked.do != "give-up":
                    yield Violation("dead", token, "its handler did not say that it is unrecoverable")
            elif letter.error_type == "WorkerLost":
                pass  # a child process that was killed with its worker may not have recorded its start
            elif letter.reason != "retries_exhausted":
                yield Violation("dead", token, f"{letter.reason}, although its entry was sound")
            elif not is_silent and not any(run.outcome == "fail" for run in finals):
                yield Violation("dead", token, f"its attempt {last} of {asked.attempts} had not failed")
            elif letter.runs != asked.attempts:
                yield Violation("dead", token, f"the letter counts {letter.runs} runs of {asked.attempts}")
            for run in runs:
                if run.outcome == "ok" and not self._excused(run, None):
                    yield Violation("dead", token, f"it was dead-lettered although {_shown(run)} and succeeded")

    def _deaths_elsewhere(self, runs: list[Run]) -> int:
        """Return how many workers died in which the job may have waited: deaths that count, but leave no start."""
        own = {run.process for run in runs}
        return sum(at >= runs[0].start for process, at in self._history.deaths.items() if process not in own)

    def _results(self, asked: Asked, runs: list[Run]) -> Iterator[Violation]:
        token = asked.token
        if asked.do != "result" or asked.answer != "ok" or not any(run.outcome == "ok" for run in runs):
            return
        stored = self._history.results.get(token)
        if stored != token and token not in self._history.dead:
            yield Violation("result", token, f"it finished, and the stored result is {stored!r}")

    # --- causes

    def _failovers_between(self, begin: float, end: float) -> int:
        """Return how often the deaths of a job may have been forgotten: a failover loses what was not replicated."""
        return sum(begin <= fault.end and fault.begin <= end for fault in self._failovers)

    def _excused(self, run: Run, again: Run | None) -> bool:
        """Return True if the process may have lost `run`, so that `again` or a dead letter may follow."""
        settled_by = self._settled_by(run)
        for cause in self._causes_of(run):
            is_in_time = again is None or cause.begin <= again.start
            if is_in_time and cause.begin <= settled_by and cause.end >= run.start:
                return True
        return again is not None and (self._was_decided_before(again) or self._was_decided_before(run))

    def _is_lost_with_its_master(self, asked: Asked, first: Run) -> bool:
        """Return True if the add was neither confirmed nor replicated: it was stored by the time of its first run."""
        return asked.answer != "ok" and self._is_lost(asked.at, first.start)

    def _was_decided_before(self, run: Run) -> bool:
        """Return True if the worker was suspended between checking the lease and the handler's first line.

        Only one job can be at this point at a time, so each suspension excuses one start.
        """
        for cause in self._causes_of(run):
            # The process resumes a moment before the record of its stop ends.
            begin = cause.begin if cause.kind == "stop" else cause.end
            if begin <= run.start <= cause.end + LATE_START_SECS * 1e9 and id(cause) not in self._spent:
                self._spent.add(id(cause))
                return True
        return False

    def _causes_of(self, run: Run) -> Iterator[Fault]:
        yield from self._causes.get(run.process, ())
        yield from self._causes.get("*", ())

    def _settled_by(self, run: Run) -> float:
        """Return the time by which the outcome must have been written, which is later after an outage."""
        if run.end == NEVER:
            return NEVER
        by = run.end + SETTLE_SECS * 1e9
        outages = [*self._outages.get(run.process, ()), *self._outages.get("*", ())]
        for outage in sorted(outages, key=lambda fault: fault.begin):
            if outage.begin <= by and outage.end >= run.end:
                by = max(by, outage.end + (RECONNECT_SECS + SETTLE_SECS) * 1e9)
        return by

    # --- schedules, unique ids, cancellations

    def schedules(self) -> Iterator[Violation]:
        fired: dict[str, list[int]] = defaultdict(list)
        for token in self._history.runs:
            spec, separator, due_text = token.partition("@")
            if separator:
                fired[spec].append(int(due_text))
        for schedule in self._history.schedules:
            due_times = sorted(fired[schedule.spec])
            for due in schedule.due_times:
                at = bisect_left(due_times, due)
                if at == len(due_times) or due_times[at] != due:
                    yield Violation("schedule", f"{schedule.spec}@{due}", "it did not fire at this due time")
            for due in due_times:
                if (due - schedule.first) % schedule.interval_ms:
                    yield Violation("schedule", f"{schedule.spec}@{due}", "it fired, and was not due")

    def unique_ids(self) -> Iterator[Violation]:
        asked_by_id: dict[str, list[Asked]] = defaultdict(list)
        for asked in self._history.asked.values():
            if asked.unique != "-":
                asked_by_id[asked.unique].append(asked)
        for job_id, several in asked_by_id.items():
            ran = [asked.token for asked in several if asked.token in self._history.runs]
            added = [asked.token for asked in several if asked.answer == "ok"]
            kept = [
                asked
                for asked in several
                if asked.token in ran and not self._is_lost_with_its_master(asked, self._history.runs[asked.token][0])
            ]
            if len(kept) > 1 or len(added) > 1:
                yield Violation("unique", job_id, f"added by {', '.join(added)}, and {', '.join(ran)} ran")
            if not ran and any(asked.answer in ("ok", "known") for asked in several):
                dead = any(asked.token in self._history.dead for asked in several)
                left = any(asked.token in self._history.left for asked in several)
                if not dead and not left:
                    yield Violation("unique", job_id, "it was confirmed, and no job of this id ran")

    def cancellations(self) -> Iterator[Violation]:
        for token, at in self._history.cancelled.items():
            for run in self._history.runs.get(token, ()):
                if run.start > at and not self._is_lost(self._history.cancels.get(token, at), at):
                    yield Violation("cancelled", token, f"{_shown(run)}, after its cancellation was confirmed")
        for token, at in self._history.requested.items():
            for run in self._history.runs.get(token, ()):
                outages = [*self._outages[run.process], *self._outages["*"]]
                if run.start > at + CANCEL_SECS * 1e9 and not self._is_disturbed(at, run, outages):
                    yield Violation("cancelled", token, f"{_shown(run)}, long after its cancel was requested")

    def _is_lost(self, begin: float, end: float) -> bool:
        """Return True if a failover may have lost what was written between the two times."""
        return any(failover.begin <= end and failover.end >= begin for failover in self._causes.get("*", ()))

    def _is_disturbed(self, cancelled_at: float, run: Run, faults: list[Fault]) -> bool:
        """Return True if the worker could not learn of the cancel: no connection, or a failover lost the request."""
        since = cancelled_at - RECONNECT_SECS * 1e9
        return any(fault.begin <= run.start and fault.end >= since for fault in faults)


def _shown(run: Run) -> str:
    end = "cut short" if run.end == NEVER else f"{run.outcome} after {(run.end - run.start) / 1e9:.3f} s"
    return f"attempt {run.attempt} began in {run.process} at {run.start / 1e9:.3f} ({end})"


def story(history: History, token: str) -> list[str]:
    """Return everything that is known about one job, in order, to explain a violation."""
    lines: list[tuple[float, str]] = []
    asked = history.asked.get(token)
    if asked:
        lines.append((asked.at, f"{asked.process} asks: do {asked.do}, {asked.attempts} attempts, id {asked.unique}"))
        lines.append((asked.answered_at, f"{asked.process} is answered: {asked.answer or 'never'}"))
    processes = {run.process for run in history.runs.get(token, ())} | {"*"}
    for run in history.runs.get(token, ()):
        lines.append((run.start, f"{run.process} starts attempt {run.attempt}"))
        lines.append((run.end, f"{run.process} ends attempt {run.attempt}: {run.outcome or 'cut short'}"))
    for fault in history.faults:
        if fault.target in processes:
            lines.append((fault.begin, f"{fault.kind} of {fault.target} begins"))
            lines.append((fault.end, f"{fault.kind} of {fault.target} ends"))
    lines += [(history.deaths[process], f"{process} is dead") for process in processes & set(history.deaths)]
    lines += [
        (NEVER, f"dead letter: {letter.reason}, {letter.error_type}, {letter.runs} runs")
        for letter in history.dead.get(token, ())
    ]
    lines.sort(key=lambda line: line[0])
    run_times = [run.start for run in history.runs.get(token, ())] or [asked.at if asked else 0]
    low, high = min(run_times) - 15e9, max(run_times) + 15e9
    return [f"{at / 1e9:.3f} {text}" for at, text in lines if low <= at <= high or at == NEVER]
