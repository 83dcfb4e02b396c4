"""A short chaos run that is part of `make test`: most faults once, with a fixed seed.

It ends when every fault was injected, not after a fixed time, so on a busy machine it only takes longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chaos.run import Setup, run

if TYPE_CHECKING:
    from pathlib import Path

#: Each fault takes some seconds, and the machine may be busy with other tests.
PATIENCE_SECS = 400

SLICES = {
    "single": Setup(
        seed=16,
        kinds=tuple("kill stop term fds server-kill client-pause oom script-flush clock-forward cut partition".split()),
    ),
    "sentinel": Setup("sentinel", seed=16, kinds=("failover", "kill")),
    "cluster": Setup("cluster", seed=16, kinds=("slot-move", "kill")),
}


@pytest.mark.timeout(PATIENCE_SECS)
@pytest.mark.parametrize("topology", SLICES)
async def test_no_promise_is_broken_under_any_fault(topology: str, tmp_path: Path) -> None:
    setup = SLICES[topology]
    # 200 jobs a second, for as long as it takes.
    setup.seconds, setup.jobs, setup.cycles = PATIENCE_SECS, 200 * PATIENCE_SECS, 1
    setup.pause_secs, setup.poison, setup.workers = 0.4, False, 3
    report = await run(setup, tmp_path / "run")
    assert report.is_clean, "\n".join(report.lines())
    assert report.kinds_missed(1) == [], "\n".join(report.lines())
