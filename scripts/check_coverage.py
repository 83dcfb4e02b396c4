"""Combines the coverage data of `make coverage`, prints it by folder, and fails below the gates.

- All lines of src/ together: at least 95 %.
- Each file: at least 85 %, or the percentage that .ci/uncovered.toml allows it, with a reason.

A file of the list that does better than its percentage plus 15 must leave it, or its percentage must be raised.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
DATA = PROJECT / "build" / "coverage"

#: Least percentage of lines: of everything, and of a file that is not on the list.
TOTAL_PERCENT = 95.0
FILE_PERCENT = 85.0
#: How much better than its allowance a file may be before the list has to follow.
SLACK_PERCENT = 15.0


def main() -> int:
    if list(DATA.glob("data.*")):
        _coverage("combine", "--quiet")
    _coverage("json", "--quiet", "-o", str(DATA / "coverage.json"))
    measured = json.loads((DATA / "coverage.json").read_text())
    files = {path.removeprefix("src/"): entry["summary"] for path, entry in measured["files"].items()}
    allowed = tomllib.loads((PROJECT / ".ci" / "uncovered.toml").read_text())
    print_by_folder(files)
    complaints = find_complaints(files, allowed)
    for complaint in complaints:
        print(f"coverage: {complaint}")
    return 1 if complaints else 0


def find_complaints(files: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    """Return one line for each gate that does not hold."""
    complaints = []
    total = percent(files.values(), "lines", "statements")
    if total < TOTAL_PERCENT:
        complaints.append(f"{total:.2f} % of all lines are covered, at least {TOTAL_PERCENT:g} % must be")
    for path, summary in sorted(files.items()):
        covered = percent([summary], "lines", "statements")
        floor = allowed[path]["percent"] if path in allowed else FILE_PERCENT
        if covered < floor:
            complaints.append(
                f"{path}: {covered:.1f} % of its lines are covered, at least {floor:g} % must be: test it, or list it "
                "with a reason in .ci/uncovered.toml"
            )
        elif path in allowed and covered > floor + SLACK_PERCENT:
            complaints.append(f"{path}: {covered:.1f} % of its lines are covered: raise its {floor:g} % or unlist it")
    gone = sorted(set(allowed) - set(files))
    return complaints + [f"{path} is listed in .ci/uncovered.toml and does not exist" for path in gone]


def print_by_folder(files: dict[str, Any]) -> None:
    folders: dict[str, list[Any]] = defaultdict(list)
    for path, summary in files.items():
        parts = Path(path).parts
        folders["/".join(parts[:2]) if len(parts) > 2 else parts[0]].append(summary)
    print(f"{'folder':24} {'lines':>7} {'covered':>8} {'branches':>9}")
    for folder, summaries in [*sorted(folders.items()), ("all", list(files.values()))]:
        statements = sum(summary["num_statements"] for summary in summaries)
        lines, branches = percent(summaries, "lines", "statements"), percent(summaries, "branches", "branches")
        print(f"{folder:24} {statements:7} {lines:7.1f}% {branches:8.1f}%")


def percent(summaries: Any, covered: str, total: str) -> float:
    """Return how much of the summaries' lines or branches ran; of nothing, everything did."""
    summaries = list(summaries)
    possible = sum(summary[f"num_{total}"] for summary in summaries)
    return 100.0 * sum(summary[f"covered_{covered}"] for summary in summaries) / possible if possible else 100.0


def _coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=PROJECT, check=True)


if __name__ == "__main__":
    sys.exit(main())
