"""Flame graphs of tampu's hot paths, and a table of where their time goes: `make profile`.

py-spy samples the process from outside, including C functions. The graphs are drawn here from its stacks and written to
`build/profile/`, with a table of the most expensive functions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from typing import Any

from bench.ours.__main__ import SCENARIOS
from bench.paths import ROOT
from bench.program.driver import run
from bench.server import fresh_server

FOLDER = ROOT / "build" / "profile"
#: The hot paths: a scenario of `bench/ours`, its arguments, and the number of repetitions.
HOT_PATHS: dict[str, tuple[str, dict[str, Any], int]] = {
    "queue-add": ("queue-add", {"total": 20_000}, 1),
    "queue-add-bulk-50": ("queue-add-bulk", {"total": 200_000, "size": 50}, 1),
    "queue-add-concurrent": ("queue-add-concurrent", {"total": 10_000}, 10),
    "worker-concurrent": ("worker", {"total": 200_000, "batch": 256}, 1),
    "worker-concurrent-events": ("worker", {"total": 100_000, "batch": 256, "events": True}, 1),
    "worker-retry-throughput": ("worker-retry", {"total": 30_000}, 1),
}
SAMPLES_PER_SEC = 500
#: Frames with a smaller share are not drawn.
LEAST_SHARE = 0.002
MOST_LISTED = 12


@dataclass
class Frame:
    """A function at one place in the call tree, with the number of samples in it and below."""

    name: str
    samples: int = 0
    children: dict[str, Frame] = field(default_factory=dict)


def tree(folded: str) -> Frame:
    """Return the tree of stacks in folded form, `a;b;c 12`."""
    root = Frame("all")
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        frame = root
        root.samples += int(count)
        for name in stack.split(";"):
            frame = frame.children.setdefault(name, Frame(name))
            frame.samples += int(count)
    return root


def own_costs(folded: str) -> list[tuple[str, float]]:
    """Return functions by the share of samples in which they were on top of the stack."""
    own: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        own[_function(stack.rpartition(";")[2])] += int(count)
    total = sum(own.values()) or 1
    return [(name, count / total) for name, count in own.most_common(MOST_LISTED)]


def _function(frame: str) -> str:
    """Return `name (file:line)` without the line: costs are summed per function."""
    return frame.rpartition(":")[0] + ")" if frame.endswith(")") and ":" in frame else frame


def draw(title: str, root: Frame) -> str:
    """Return the tree as an SVG, with the callers at the top."""
    width, row = 1200, 18
    boxes: list[str] = []
    depth = 0

    def put(frame: Frame, left: float, level: int) -> None:
        nonlocal depth
        wide = width * frame.samples / root.samples
        if frame.samples < root.samples * LEAST_SHARE:
            return
        depth = max(depth, level)
        share = frame.samples / root.samples
        is_ours = "tampu/" in frame.name
        shade = "#e8875a" if is_ours else "#b9c4d0" if ".py" in frame.name else "#8fb08c"
        shown = escape(frame.name[: int(wide / 6.6)]) if wide > 20 else ""
        y = 30 + level * row
        boxes.append(
            f'<g><title>{escape(frame.name)}: {share:.1%}</title><rect x="{left:.1f}" y="{y}" width="{wide:.1f}" '
            f'height="{row - 1}" fill="{shade}" rx="2"/><text x="{left + 3:.1f}" y="{y + 13}">{shown}</text></g>'
        )
        for child in sorted(frame.children.values(), key=lambda each: -each.samples):
            put(child, left, level + 1)
            left += width * child.samples / root.samples

    put(root, 0, 0)
    height = 40 + (depth + 1) * row
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
        "<style>text { font: 11px monospace; fill: #1f2328 }</style>"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/><text x="4" y="18">{escape(title)}: {root.samples} '
        "samples; orange: tampu, grey: Python, green: C</text>" + "\n".join(boxes) + "</svg>\n"
    )


def record(name: str, server: Any) -> str:
    """Return py-spy's stacks of one hot path."""
    from install_peers import environment

    spy = environment("py-spy") / "bin" / "py-spy"
    stacks = FOLDER / f"{name}.folded"
    what = [sys.executable, "-m", "bench.profile", "--run", name, "--url", server.url]
    how = ["record", "--rate", str(SAMPLES_PER_SEC), "--format", "raw", "--native", "--output", str(stacks), "--"]
    done = subprocess.run([str(spy), *how, *what], capture_output=True, text=True, cwd=ROOT)
    if done.returncode or not stacks.exists():
        last = next(reversed(done.stderr.strip().splitlines()), "no reason given")
        raise SystemExit(f"profile: py-spy cannot read the process: {last}")
    return stacks.read_text()


def run_hot_path(name: str, url: str) -> None:
    """Run a hot path, in the process that is profiled."""
    scenario, arguments, times = HOT_PATHS[name]
    for _ in range(times):
        run(SCENARIOS[scenario], url, **arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="only these hot paths, separated by commas")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_hot_path(arguments.run, arguments.url)
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in arguments.only.split(",") if arguments.only else HOT_PATHS:
        with fresh_server() as server:
            folded = _in_the_scenario(record(name, server))
        (FOLDER / f"{name}.svg").write_text(draw(name, tree(folded)))
        lines += [f"{name}", *(f"  {share:6.1%}  {function}" for function, share in own_costs(folded)), ""]
        print("\n".join(lines[-MOST_LISTED - 2 :]), flush=True)
    (FOLDER / "costs.txt").write_text("\n".join(lines))
    print(f"profile: flame graphs are in {FOLDER.relative_to(ROOT)}/", file=sys.stderr)
    return 0


def _in_the_scenario(folded: str) -> str:
    """Keep only the scenario itself: drop the start and end of the process, and filling the queue for a worker."""
    kept = []
    for line in folded.splitlines():
        frames = line.split(";")
        inside = [number for number, frame in enumerate(frames) if frame.startswith("run_hot_path ")]
        if inside and not any(frame.startswith("fill (") for frame in frames):
            kept.append(";".join(frames[inside[0] :]))
    return "\n".join(kept)


if __name__ == "__main__":
    sys.exit(main())
