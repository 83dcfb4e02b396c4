"""The checker on a small queue that can be broken on purpose: it accepts every program of a correct queue, and finds
every bug. Hypothesis shrinks the program to the few steps that matter.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from chaos.checker import check
from chaos.records import Asked, DeadLetter, Fault, History, Run

if TYPE_CHECKING:
    from chaos.checker import Violation

WORKERS = ("w", "v")


class SmallQueue:
    """A minimal queue with leases. Each step takes a second, or ten if a lease has to expire."""

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.history = History(lease_secs=4.0)
        self.now = 0.0
        self.waiting: deque[tuple[str, int]] = deque()
        #: The runs that each worker process holds.
        self.held: dict[str, list[Run]] = {worker: [] for worker in WORKERS}
        self.names = {worker: f"{worker}1" for worker in WORKERS}
        self.ids: set[str] = set()

    def tick(self, seconds: float = 1.0) -> float:
        self.now += seconds * 1e9
        return self.now

    def add(self, attempts: int, unique: str = "-", *, is_refused: bool = False) -> None:
        token = f"j{len(self.history.asked)}"
        asked = Asked(token, "ok", attempts, unique, "p", self.tick())
        self.history.asked[token] = asked
        is_known = unique in self.ids and self.bug != "ids are forgotten"
        asked.answer, asked.answered_at = "refused" if is_refused else "known" if is_known else "ok", self.tick()
        if asked.answer == "ok" or (is_refused and self.bug == "refused adds are stored"):
            self.waiting.append((token, 0))
            if unique != "-":
                self.ids.add(unique)

    def start(self, worker: str) -> None:
        if self.waiting:
            token, attempt = self.waiting.popleft()
            if self.bug == "delivered twice" and len(self.history.asked) > 1:
                self.waiting.append((token, attempt))
                self.bug = ""
            run = Run(token, self.names[worker], attempt, self.tick())
            self.history.runs[token].append(run)
            self.held[worker].append(run)

    def end(self, worker: str, outcome: str) -> None:
        if self.held[worker]:
            run = self.held[worker].pop(0)
            run.end, run.outcome = self.tick(), outcome
            attempts = self.history.asked[run.token].attempts
            if outcome == "fail" and self.bug != "failures are acknowledged":
                if run.attempt + 1 < attempts:
                    self.waiting.append((run.token, run.attempt + 1))
                else:
                    self.bury(run.token, attempts, "OnPurposeError")

    def kill(self, worker: str) -> None:
        self.history.deaths[self.names[worker]] = self.tick()
        self.names[worker] = f"{worker}{len(self.history.deaths) + 1}"
        runs, self.held[worker] = self.held[worker], []
        self.tick(10)
        for run in runs:
            self.take_over(run)
        if self.bug == "neighbours are buried" and runs:
            for token, _ in self.waiting:
                self.bury(token, 1, "WorkerLost")
            self.waiting.clear()

    def pause_the_server(self) -> None:
        self.history.faults.append(Fault("client-pause", "*", self.tick(), self.tick(10)))
        if self.bug == "no grace after an outage":
            for runs in self.held.values():
                self.waiting.extend((run.token, run.attempt) for run in runs)

    def take_over(self, run: Run) -> None:
        asked = self.history.asked[run.token]
        if self.bug == "the jobs of the dead are forgotten":
            return
        deaths = sum(not one.outcome and one.attempt == run.attempt for one in self.history.runs[run.token])
        attempts_left = asked.attempts - run.attempt
        if attempts_left == 1 or deaths >= min(6, attempts_left + 3):
            self.bury(run.token, 1, "WorkerLost")
        else:
            self.waiting.append((run.token, run.attempt + (self.bug == "deaths use up attempts")))

    def bury(self, token: str, runs: int, error_type: str) -> None:
        self.history.dead[token].append(DeadLetter(token, "retries_exhausted", runs, error_type))

    def drain(self) -> list[Violation]:
        """Finish all jobs, and check the history."""
        while self.waiting or any(self.held.values()):
            self.start("w")
            for worker in WORKERS:
                self.end(worker, "ok")
        for runs in self.history.runs.values():
            runs.sort(key=lambda run: run.start)
        return check(self.history)


class Program(RuleBasedStateMachine):
    """Any sequence of steps, drained and checked at the end."""

    bug: ClassVar[str] = ""
    #: The steps and violations of the last program that broke a promise; once hypothesis is done, the smallest one.
    broken: ClassVar[tuple[list[str], list[Violation]] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.queue = SmallQueue(self.bug)
        self.steps: list[str] = []

    @rule(attempts=st.integers(1, 3))
    def add(self, attempts: int) -> None:
        self.steps.append("add")
        self.queue.add(attempts)

    @rule(unique=st.sampled_from(["x", "y"]))
    def add_unique(self, unique: str) -> None:
        self.steps.append("add unique")
        self.queue.add(3, unique)

    @rule()
    def add_refused(self) -> None:
        self.steps.append("add refused")
        self.queue.add(3, is_refused=True)

    @rule(worker=st.sampled_from(WORKERS))
    def start(self, worker: str) -> None:
        self.steps.append("start")
        self.queue.start(worker)

    @rule(worker=st.sampled_from(WORKERS), outcome=st.sampled_from(["ok", "fail"]))
    def end(self, worker: str, outcome: str) -> None:
        self.steps.append(f"end {outcome}")
        self.queue.end(worker, outcome)

    @rule(worker=st.sampled_from(WORKERS))
    def kill(self, worker: str) -> None:
        self.steps.append("kill")
        self.queue.kill(worker)

    @rule()
    def pause_the_server(self) -> None:
        self.steps.append("pause")
        self.queue.pause_the_server()

    def teardown(self) -> None:
        violations = self.queue.drain()
        if violations:
            type(self).broken = self.steps, violations
        assert violations == []


SOUND_SETTINGS = settings(max_examples=150, stateful_step_count=25, deadline=None, database=None, derandomize=True)
BROKEN_SETTINGS = settings(
    SOUND_SETTINGS,
    max_examples=500,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_any_program_of_a_sound_queue_passes() -> None:
    run_state_machine_as_test(Program, settings=SOUND_SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "rule_broken", "smallest"),
    [
        ("the jobs of the dead are forgotten", "unfinished", ["add", "start", "kill"]),
        ("failures are acknowledged", "unfinished", ["add", "start", "end fail"]),
        ("deaths use up attempts", "attempts", ["add", "start", "kill"]),
        ("delivered twice", "rerun", ["add", "add"]),
        ("no grace after an outage", "rerun", ["add", "start", "pause"]),
        ("neighbours are buried", "dead", ["add", "add", "start", "kill"]),
        ("refused adds are stored", "invented", ["add refused"]),
        ("ids are forgotten", "unique", ["add unique", "add unique"]),
    ],
)
def test_a_broken_queue_is_found_and_shrunk_to_the_steps_that_matter(
    bug: str, rule_broken: str, smallest: list[str]
) -> None:
    broken: Any = type("Broken", (Program,), {"bug": bug, "broken": None})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(broken, settings=BROKEN_SETTINGS)
    steps, violations = broken.broken
    assert rule_broken in {violation.rule for violation in violations}
    assert len(steps) <= len(smallest), f"{steps}: {violations}"
