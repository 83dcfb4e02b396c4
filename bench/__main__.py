"""`python -m bench quick | full | report`, run by `make bench-quick`, `make bench` and `make bench-report`."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import bars, plan
from bench.contestants import PeerFailed, Program, own_command, peer_command
from bench.paths import PUBLISHED, RESULTS, ROOT
from bench.record import Record, new_record
from bench.runner import interleave
from bench.server import fresh_server

#: Spark takes by far the longest: run three rounds, for at most ten minutes.
SPARK_ROUNDS = 3
SPARK_ROWS = 500_000
SPARK_PATIENCE_SECS = 600


def start(names: list[str], server: Any, record: Record, stack: contextlib.ExitStack) -> list[Program]:
    """Start every available contestant. Report the others on stderr, in the file and in the table."""
    from install_peers import PACKAGES, Unavailable

    started = []
    own = {"tampu": "bench.ours", "bare loop": "bench.limit"}
    for name in names:
        try:
            command = own_command(own[name]) if name in own else peer_command(name)
            program = Program(name, command, server.url, server.pid)
        except (Unavailable, PeerFailed) as reason:
            print(f"bench: {name} is left out: {reason}", file=sys.stderr)
            record.contestants[name] = {"unavailable": str(reason)}
            continue
        stack.callback(program.close)
        versions = program.about["versions"]
        if name in PACKAGES and PACKAGES[name].is_node:
            versions = {name.removesuffix("-node"): PACKAGES[name].version, **versions}
        record.contestants[name] = {"versions": versions, "settings": program.about["settings"]}
        started.append(program)
    return started


def run_quick(arguments: argparse.Namespace) -> Record:
    """Measure the targets, in about 4 minutes."""
    with fresh_server() as server, contextlib.ExitStack() as stack:
        record = new_record("quick", f"Redis {server.version}")
        programs = start(["tampu", "chasquimq", "bare loop", *plan.RSMQ_PEERS], server, record, stack)
        wanted = set(arguments.scenarios.split(",")) if arguments.scenarios else plan.QUICK
        scenarios = [scenario for scenario in plan.SCENARIOS if scenario.name in wanted]
        measures = plan.core(programs, server, scenarios) + plan.payloads(programs, plan.QUICK_PAYLOADS)
        measures += plan.latencies(programs[:1], (100, 1000), 2.0, rounds=2)
        measures += plan.server_memory(programs) + plan.rsmq(programs, slices=6, rounds=3)
        measures += plan.cold_starts(programs)
        if arguments.scenarios:
            measures = [measure for measure in measures if measure.scenario in wanted]
        reset = server.client().flushall
        interleave(measures, arguments.rounds or 5, record, reset)
    return record


def run_full(arguments: argparse.Namespace) -> Record:
    """Run all contestants in all scenarios, in about 15 minutes."""
    with fresh_server() as server, contextlib.ExitStack() as stack:
        record = new_record("full", f"Redis {server.version}")
        names = arguments.only.split(",") if arguments.only else [*plan.PEERS, *plan.RSMQ_PEERS]
        programs = start(["tampu", *names, "bare loop"], server, record, stack)
        ours = programs[0]
        measures = plan.core(programs, server, plan.SCENARIOS)
        if not arguments.only:
            measures += plan.payloads(programs) + plan.latencies(programs) + plan.processes(ours) + plan.memory(ours)
            measures += plan.server_memory(programs) + plan.cold_starts(programs)
            measures += plan.rsmq(programs)
        deadline = time.monotonic() + arguments.minutes * 60
        interleave(measures, arguments.rounds or 5, record, server.client().flushall, deadline)
    if not arguments.no_spark and not arguments.only:
        add_spark(record)
    return record


def add_spark(record: Record) -> None:
    """Run the Spark part in a separate process, with its own server."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spark.json"
        size = ("--rows", str(SPARK_ROWS), "--rounds", str(SPARK_ROUNDS))
        command = [sys.executable, "-m", "bench.spark", *size, "--file", str(path)]
        try:
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=SPARK_PATIENCE_SECS, cwd=ROOT)
        except subprocess.TimeoutExpired:
            print(f"bench: Spark did not finish within {SPARK_PATIENCE_SECS} s", file=sys.stderr)
        if not path.exists():
            record.contestants["Spark"] = {"unavailable": "it did not run; see the output above"}
            return
        spark = Record.load(path)
        record.samples += spark.samples
        record.contestants |= spark.contestants


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("verb", choices=["quick", "full", "report"])
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 5)")
    parser.add_argument("--minutes", type=float, default=12.0, help="full: start no new round after this time")
    parser.add_argument("--only", help="full: only these peers, separated by commas, in the scenarios they share")
    parser.add_argument("--scenarios", help="quick: only these scenarios, separated by commas")
    parser.add_argument("--publish", action="store_true", help="write the page, the plots and the README's table")
    parser.add_argument("--no-spark", action="store_true", help="full: leave out Spark")
    parser.add_argument("--file", type=Path, help="file to write the samples to, or to read them from (report)")
    arguments = parser.parse_args()
    if arguments.verb == "report":
        from bench.report import publish

        publish(Record.load(arguments.file or PUBLISHED))
        return 0
    began = time.monotonic()
    record = run_quick(arguments) if arguments.verb == "quick" else run_full(arguments)
    lines = bars.judge(record)
    record.seconds = time.monotonic() - began
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = arguments.file or RESULTS / f"{arguments.verb}-{stamp}.json"
    record.save(path)
    print(f"bench: {len(record.samples)} samples in {record.seconds:.0f} s, written to {path}", file=sys.stderr)
    if arguments.publish:
        from bench.report import publish

        publish(record)
    print("\n".join(lines))
    # The quick run is a gate and must pass; the full run is informational.
    return 0 if arguments.verb == "full" or all(bar["holds"] for bar in record.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
