"""Fails if src/ has more lines or files of Python than .ci/ceilings.toml allows."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def main() -> int:
    ceilings = tomllib.loads((PROJECT / ".ci" / "ceilings.toml").read_text())
    files = [file for file in (PROJECT / "src").rglob("*.py") if "templates" not in file.parts]
    found = {"lines": sum(len(file.read_text().splitlines()) for file in files), "files": len(files)}
    print(f"size: {found['lines']:,} lines in {found['files']} files of Python in src/")
    above = [name for name, number in found.items() if number > ceilings[name]]
    for name in above:
        print(
            f"size: at most {ceilings[name]:,} {name} are allowed: delete something, or raise it in .ci/ceilings.toml"
        )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
