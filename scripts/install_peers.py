"""Installs the other implementations that tests and benchmarks run beside tampu, each in a virtual environment.

They live in the cache folder, outside the checkout: chasquimq pins versions of redis-py that we cannot use.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.binaries import cache_dir

CHASQUIMQ = ("chasquimq==1.3.0", "uvloop")


def chasquimq_python() -> Path:
    """The Python of the environment with chasquimq in it; made at the first call."""
    return _environment("chasquimq-1.3.0", CHASQUIMQ)


def _environment(name: str, packages: tuple[str, ...]) -> Path:
    folder = cache_dir() / "peers" / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if done.exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once install it once
        if not done.exists():
            print(f"installing {name} into the cache (some seconds)", file=sys.stderr)
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
            done.touch()
    return python


if __name__ == "__main__":
    print(chasquimq_python())
