"""`make fuzz`: fuzzes every target for its share of the time.

A finding is made small, printed, and added to the corpus, where the tests run it from then on.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from fuzz.fuzzer import Finding, Fuzzer, keep, smaller
from fuzz.targets import TARGETS

BATCH = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="over all targets")
    parser.add_argument("--seed", type=int, default=0, help="0: a random one, which is printed")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new lines to the corpus")
    options = parser.parse_args()
    seed = options.seed or random.randrange(1, 1_000_000)
    names = options.target or list(TARGETS)
    print(f"fuzz: seed {seed}, {len(names)} targets, {options.minutes:g} minutes", flush=True)
    findings: dict[tuple[str, str], Finding] = {}
    for name in names:
        fuzzer = Fuzzer(name, seed)
        deadline = time.monotonic() + options.minutes * 60 / len(names)
        new = 0
        found = list(fuzzer.first())
        while time.monotonic() < deadline:
            for item in fuzzer.more(BATCH):
                if isinstance(item, Finding):
                    found.append(item)
                else:
                    new += 1
                    if options.keep:
                        keep(name, item)
        for finding in found:
            where = finding.text.rpartition(" at ")[2]
            if (name, where) not in findings:
                findings[name, where] = shortest = smaller(finding)
                keep(name, shortest.data)
                print(f"FINDING {shortest}", flush=True)
        print(f"  {name:16} {fuzzer.runs:9,} inputs, {len(fuzzer.corpus):4} kept, {new:3} new", flush=True)
    print(f"fuzz: {len(findings)} findings; run it again with SEED={seed}", flush=True)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
