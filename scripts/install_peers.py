"""Installs the other implementations that tests and benchmarks run, each in its own environment.

They are kept in the cache folder, outside the checkout, because their dependencies conflict with each other and ours.

    python scripts/install_peers.py            # only chasquimq, which the tests need; prints its Python
    python scripts/install_peers.py --all      # every peer of the benchmarks; prints which cannot be installed, and why
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.binaries import cache_dir


class Unavailable(Exception):  # noqa: N818 - reads like a sentence
    """A peer cannot be installed here; the message is one line that says why."""


@dataclass(frozen=True)
class Package:
    """One published peer with a pinned version."""

    name: str
    version: str
    #: Requirements for pip or npm: the peer first, then packages that make it faster.
    requirements: tuple[str, ...]
    is_node: bool = False


PACKAGES = {
    package.name: package
    for package in (
        Package("chasquimq", "1.3.0", ("chasquimq==1.3.0", "uvloop")),
        Package("bullmq", "3.4.4", ("bullmq==3.4.4", "uvloop", "hiredis")),
        Package("bullmq-node", "6.7.0", ("bullmq@6.7.0", "ioredis@5"), is_node=True),
        Package("celery", "5.7.0", ("celery[redis]==5.7.0", "hiredis")),
        Package("dramatiq", "2.2.1", ("dramatiq[redis]==2.2.1", "hiredis")),
        Package("rq", "2.12.0", ("rq==2.12.0", "hiredis")),
        Package("arq", "0.28.0", ("arq==0.28.0", "uvloop", "hiredis")),
        Package("saq", "0.26.4", ("saq[redis,hiredis]==0.26.4", "typing_extensions", "uvloop")),
        Package("taskiq", "1.2.4", ("taskiq-redis==1.2.4", "taskiq[uv]", "hiredis")),
        Package("huey", "3.5.4", ("huey==3.5.4", "redis", "hiredis")),
        Package("streaq", "7.2.0", ("streaq==7.2.0", "uvloop")),
        Package("rsmq", "0.12.4", ("rsmq@0.12.4",), is_node=True),
        Package("pyrsmq", "0.6.1", ("PyRSMQ==0.6.1", "hiredis")),
        Package("py-spy", "0.4.3", ("py-spy==0.4.3",)),  # not a peer: the profiler used by `make profile`
    )
}


def chasquimq_python() -> Path:
    """Return the Python of the environment with chasquimq, which is created on the first call."""
    return program("chasquimq")


def program(name: str) -> Path:
    """Return the program that runs this peer: its Python, or node. Install it on first use; may raise `Unavailable`."""
    package = PACKAGES[name]
    folder = environment(name)
    if not package.is_node:
        return folder / "bin" / "python"
    return Path(_required("node"))


def environment(name: str) -> Path:
    """Return the folder of this peer: a virtual environment, or a folder with node_modules."""
    package = PACKAGES[name]
    kind = "node" if package.is_node else f"py{sys.version_info.major}.{sys.version_info.minor}"
    # The npm package `rsmq` is in the folder where its tests look for it.
    folder_name = f"rsmq-{package.version}" if name == "rsmq" else f"{name}-{package.version}-{kind}"
    folder = cache_dir() / "peers" / folder_name
    done = folder / ("node_modules" if package.is_node else ".installed")
    if done.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder_name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at the same time install it once
        if not done.exists():
            print(f"peers: installing {name} {package.version} into the cache (a few seconds)", file=sys.stderr)
            (_npm_install if package.is_node else _pip_install)(package, folder)
    return folder


def _pip_install(package: Package, folder: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    pip: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    _run(package, [*pip, *package.requirements])
    (folder / ".installed").touch()


def _npm_install(package: Package, folder: Path) -> None:
    # Install into a temporary folder and rename it at the end: an interrupted run must not look like an installed peer.
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        quiet = ["--no-save", "--no-audit", "--no-fund", "--prefix", str(scratch)]
        _run(package, [_required("npm"), "install", *quiet, *package.requirements], cwd=scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(package: Package, command: list[str | Path], cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if "error" in line.lower()]
        reason = said[0].strip() if said else f"{Path(command[0]).name} exited with code {done.returncode}"
        raise Unavailable(f"{package.name} {package.version} cannot be installed: {reason}")


def _required(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise Unavailable(f"{tool} is not on PATH")
    return found


def main(arguments: list[str]) -> int:
    if "--all" not in arguments:
        print(chasquimq_python())
        return 0
    missing = 0
    for name in PACKAGES:
        try:
            environment(name)
        except Unavailable as reason:
            missing += 1
            print(f"peers: {reason}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
