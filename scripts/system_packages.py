"""Installs Debian packages that a build or a test needs, and always says so first: what, and what for.

Only as root, only with apt-get, and never with TAMPU_SYSTEM_PACKAGES=no; otherwise it prints the command to run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def install(packages: list[str], purpose: str) -> bool:
    """Install the packages and return whether they are there now."""
    names = " ".join(packages)
    if not shutil.which("apt-get"):
        say(f"{names} needed for {purpose}, and there is no apt-get to install them")
        return False
    if os.geteuid() != 0 or os.environ.get("TAMPU_SYSTEM_PACKAGES") == "no":
        say(f"{names} needed for {purpose}: run `apt-get install {names}` as root")
        return False
    say(f"installing {names} with apt-get, for {purpose} (TAMPU_SYSTEM_PACKAGES=no prevents this)")
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "--quiet", *step],
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            say(f"apt-get {step[0]} failed: {' '.join(said)}")
            return False
    return True


def say(line: str) -> None:
    print(f"system packages: {line}", file=sys.stderr, flush=True)
