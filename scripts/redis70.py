"""Unpacks Redis 7.0 from Debian 12 into its own folder. It is not installed, so no service is started."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from debian_archive import Archive

if TYPE_CHECKING:
    from pathlib import Path

#: Debian release that has Redis 7.0.
SUITE = "bookworm"

#: The server, its tools, and libraries that a small system may lack.
PACKAGES = ("redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1", "libssl3")

#: Runs a program from the folder with the libraries next to it; `exec` keeps the process ID.
LAUNCHER = """\
#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH="$here/{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export LD_LIBRARY_PATH
exec "$here/usr/bin/{program}" "$@"
"""


def install(folder: Path, scratch: Path) -> None:
    """Unpack redis-server and its tools into `folder`."""
    for package in Archive(SUITE, "deb", scratch).packages(*PACKAGES):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    libraries = next(folder.glob("usr/lib/*/libjemalloc.so.2")).parent.relative_to(folder)
    for program in ("redis-server", "redis-cli", "redis-benchmark"):
        launcher = folder / program
        launcher.write_text(LAUNCHER.format(program=program, libraries=libraries))
        launcher.chmod(0o755)
