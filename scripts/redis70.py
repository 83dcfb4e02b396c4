"""Unpacks Redis 7.0, the package of Debian 12, into a folder of its own: not installed, so no service is started."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from debian_archive import Archive

if TYPE_CHECKING:
    from pathlib import Path

#: Debian's name of the release that has Redis 7.0.
SUITE = "bookworm"

#: The server, its tools, and the libraries of theirs that a small system may lack.
PACKAGES = ("redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1", "libssl3")

#: Runs a program of the folder with the libraries beside it; `exec` keeps the process id.
LAUNCHER = """\
#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH="$here/{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export LD_LIBRARY_PATH
exec "$here/usr/bin/{program}" "$@"
"""


def install(folder: Path, scratch: Path) -> None:
    """Fills `folder` with redis-server and its tools."""
    for package in Archive(SUITE, "deb", scratch).packages(*PACKAGES):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    libraries = next(folder.glob("usr/lib/*/libjemalloc.so.2")).parent.relative_to(folder)
    for program in ("redis-server", "redis-cli", "redis-benchmark"):
        launcher = folder / program
        launcher.write_text(LAUNCHER.format(program=program, libraries=libraries))
        launcher.chmod(0o755)
