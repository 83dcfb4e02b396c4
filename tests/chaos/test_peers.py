"""The checker finds the known bugs of chasquimq 1.3.0 workers, without injected faults.

The numbers are those of the findings that `tests/findings` covers for tampu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chaos.run import Setup, run
from interop.peers import chasquimq_python

if TYPE_CHECKING:
    from pathlib import Path


#: Maximum number of runs of 12 s: which worker gets a job is random, so one run may not show all three bugs.
MOST_RUNS = 5


@pytest.mark.timeout(600)
async def test_the_known_faults_of_chasquimq_are_found(tmp_path: Path) -> None:
    found: dict[str, set[str]] = {
        # 13: a handler longer than the lease is started again while it runs.
        "longer than the lease": set(),
        # 14: jobs that wait in a worker for longer than the lease run again, although their handlers are quick.
        "shorter than the lease": set(),
        # 15: a job that kills its worker runs once more than it has attempts.
        "killers": set(),
    }
    for seed in range(MOST_RUNS):
        setup = Setup(
            seed=seed,
            jobs=300,
            seconds=12,
            workers=2,
            peers=2,
            peer_python=chasquimq_python(),
            concurrency=4,
            lease_secs=2.0,
            schedules=0,
            kinds=(),
            rare=("long", "die"),
            long_secs=1.0,
            extra_runs=0,
            drain_secs=60,
        )
        report = await run(setup, tmp_path / f"run-{seed}")
        history = report.history
        assert history is not None
        for violation in report.violations:
            asked = history.asked.get(violation.token)
            what, _, ms = asked.do.partition(":") if asked else ("", "", "")
            if violation.rule == "rerun" and what == "nap":
                is_long = int(ms) > setup.lease_secs * 1000
                found["longer than the lease" if is_long else "shorter than the lease"].add(violation.token)
            if violation.rule == "attempts" and what == "die":
                found["killers"].add(violation.token)
        if all(found.values()):
            return
    raise AssertionError(f"not all faults were found in {MOST_RUNS} runs: {found}")
