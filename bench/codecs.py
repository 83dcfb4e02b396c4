"""Measures what payload codecs cost a worker with default settings: `make bench-codecs`.

Runs `worker-default` with payloads of 1 KB plain, signed and encrypted, in turn, and prints CPU time per job and the
rate: the best round and the median, each with its difference from plain. Only differences from one run are comparable.
"""

from __future__ import annotations

import argparse
import statistics

from bench.contestants import Program, own_command
from bench.ours.defaults import CODECS
from bench.server import fresh_server

PAYLOAD_BYTES = 1000
FIGURES = ("client_us", "server_us", "total_us", "rate")


def measure(rounds: int, jobs: int) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each round by codec, after one round to warm up."""
    samples: dict[str, list[dict[str, float]]] = {"plain": [], **{name: [] for name in CODECS}}
    with fresh_server() as server:
        program = Program("tampu", own_command("bench.ours"), server.url, server.pid)
        try:
            for each in range(rounds + 1):
                for name, found in samples.items():
                    server.client().flushall()
                    codec = "" if name == "plain" else name
                    figures = program.ask("worker-default", total=jobs, codec=codec, payload_bytes=PAYLOAD_BYTES)
                    figures["total_us"] = figures["client_us"] + figures["server_us"]
                    if each:
                        found.append(figures)
        finally:
            program.close()
    return samples


def table(samples: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the lines of the table."""
    lines = [f"{'':<22}" + "".join(f"{name:>19}" for name in samples)]
    for figure in FIGURES:
        best = max if figure == "rate" else min
        for label, reduce in (("best", best), ("median", statistics.median)):
            row = [reduce([one[figure] for one in found]) for found in samples.values()]
            cells = "".join(f"{value:>12,.1f} {value / row[0] - 1:>+6.1%}" for value in row)
            lines.append(f"{figure + ', ' + label:<22}{cells}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.codecs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds (default: 9)")
    parser.add_argument("--jobs", type=int, default=5_000, help="number of jobs per round and codec (default: 5,000)")
    arguments = parser.parse_args()
    print("\n".join(table(measure(arguments.rounds, arguments.jobs))))


if __name__ == "__main__":
    main()
