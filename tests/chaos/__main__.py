"""`make chaos`: run the fleet under injected faults, check its history and print a report.

python -m chaos --minutes 10 --seed 7                 # all topologies, 10 minutes in total
python -m chaos --jobs 340000 --seed 1 --topology single --json figures.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from pathlib import Path

from chaos.run import Report, Setup, run
from chaos.servers import fast_folder

#: Share of the time and of the jobs for each topology.
SHARES = {"single": 0.7, "sentinel": 0.15, "cluster": 0.15}
#: Minimum number of faults of each kind that must hit a job in flight, in a run of 10 minutes.
LEAST_HITS = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long jobs are added, all topologies together")
    parser.add_argument("--jobs", type=int, default=0, help="total number of jobs; default: 500 per second")
    parser.add_argument("--seed", type=int, default=0, help="0: a random seed, which is printed")
    parser.add_argument("--topology", choices=sorted(SHARES), action="append")
    parser.add_argument("--kinds", help="only these faults, separated by commas")
    parser.add_argument("--calm", type=float, default=1.0, help="factor for the pauses between faults")
    parser.add_argument("--skip-missed", action="store_true", help="use schedules that skip missed fires")
    parser.add_argument("--least-hits", type=int, default=LEAST_HITS)
    parser.add_argument("--keep", type=Path, help="keep records and logs in this folder")
    parser.add_argument("--json", type=Path, help="append the figures of each run to this file")
    options = parser.parse_args()
    seed = options.seed or random.randrange(1, 1_000_000)
    topologies = options.topology or list(SHARES)
    jobs = options.jobs or int(options.minutes * 60 * 500)
    whole = sum(SHARES[topology] for topology in topologies)
    print(f"chaos: seed {seed}, {jobs:,} jobs, {options.minutes:g} minutes, {', '.join(topologies)}", flush=True)
    failed = False
    for topology in topologies:
        share = SHARES[topology] / whole
        setup = Setup(
            topology=topology,
            seed=seed,
            jobs=int(jobs * share),
            seconds=options.minutes * 60 * share,
            pause_secs=1.5 * options.calm,
            rare_secs=1.5 * options.calm,
            fires_all=not options.skip_missed,
            kinds=tuple(options.kinds.split(",")) if options.kinds else None,
        )
        report = in_a_folder(setup, options.keep)
        print("\n".join(report.lines()), flush=True)
        missed = report.kinds_missed(options.least_hits)
        if missed:
            print(f"  too few hits (fewer than {options.least_hits}): {', '.join(missed)}", flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(report.as_json() + "\n")
        failed = failed or not report.is_clean or bool(missed)
    print(f"chaos: {'FAILED' if failed else 'no violation'}; run it again with SEED={seed}", flush=True)
    return int(failed)


def in_a_folder(setup: Setup, keep: Path | None) -> Report:
    """Run in a temporary folder, in memory if possible. Delete it afterwards unless `keep` is given."""
    parent = keep or fast_folder(Path(tempfile.gettempdir()))
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{setup.topology}-{setup.seed}-", dir=parent))
    try:
        return asyncio.run(run(setup, folder, lambda line: print(f"chaos: {line}", flush=True)))
    finally:
        if keep is None:
            shutil.rmtree(parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
