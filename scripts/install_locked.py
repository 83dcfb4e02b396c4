"""Installs the locked packages, and tampu from this checkout, into an environment.

    .venv/bin/python scripts/install_locked.py .venv

Every archive must have a hash of requirements/*.txt. What comes as source is built with the locked build tools and not
in an environment that pip would download for it; tampu itself is built last, from the checkout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def main(environment: str) -> int:
    pip = [str(Path(environment) / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    locked = [*pip, "--require-hashes", "--no-deps", "--no-build-isolation"]
    for command in (
        [*locked, "-r", str(PROJECT / "requirements" / "build.txt")],
        [*locked, "-r", str(PROJECT / "requirements" / "dev.txt")],
        [*pip, "--no-deps", "--no-build-isolation", "-e", str(PROJECT)],
    ):
        if code := subprocess.run(command).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
