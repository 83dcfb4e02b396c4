"""The checker beside a queue whose faults are known: workers of chasquimq 1.3.0 in the fleet, and nothing injected.

The numbers are those of the list of findings that `tests/findings` covers for tampu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chaos.run import Setup, run
from interop.peers import chasquimq_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(300)
async def test_the_known_faults_of_chasquimq_are_found(tmp_path: Path) -> None:
    setup = Setup(
        seed=3,
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
    report = await run(setup, tmp_path / "run")
    history = report.history
    assert history is not None
    lease_ms = setup.lease_secs * 1000
    found: dict[str, set[str]] = {"longer than the lease": set(), "shorter than the lease": set(), "killers": set()}
    for violation in report.violations:
        asked = history.asked.get(violation.token)
        what, _, ms = asked.do.partition(":") if asked else ("", "", "")
        if violation.rule == "rerun" and what == "nap":
            found["longer than the lease" if int(ms) > lease_ms else "shorter than the lease"].add(violation.token)
        if violation.rule == "attempts" and what == "die":
            found["killers"].add(violation.token)
    # 13: a handler longer than the lease is started again while it runs.
    assert found["longer than the lease"], found
    # 14: jobs that wait in a worker for longer than the lease run again, although their handlers are quick.
    assert found["shorter than the lease"], found
    # 15: a job that kills its worker runs once more than it has attempts.
    assert found["killers"], found
