"""The releases of a mixed fleet, each in its own environment: this checkout, and 0.1.0 built from its commit.

The environment of 0.1.0 is made once and kept in the cache, with the dependencies that release was tested with.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from servers.binaries import cache_dir
from servers.require import unavailable

PROJECT = Path(__file__).parents[2]
APP = Path(__file__).with_name("fleet.py")

VERSION = "0.1.0"
COMMIT = "6b4dc01"

#: How long one command may take on a busy machine.
PATIENCE_SECS = 60.0


@dataclass(frozen=True)
class Release:
    """One release and how to run its programs."""

    name: str
    python: Path

    def start(self, *arguments: str, url: str, log: Path, process: str) -> subprocess.Popen[bytes]:
        """Start `tampu ARGUMENTS` of this release; `fleet` can be imported there, and records its runs in `log`."""
        with log.with_suffix(".err").open("ab") as errors:
            return subprocess.Popen(
                [str(self.python), "-m", "tampu.cli", *arguments],
                cwd=APP.parent,
                env={**self._environment(url, log), "FLEET_PROCESS": process},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # a supervisor and its worker are killed together
            )

    def cli(self, *arguments: str, url: str) -> Any:
        """Run `tampu ARGUMENTS --json` of this release and return what it printed."""
        done = subprocess.run(
            [str(self.python), "-m", "tampu.cli", *arguments, "--json"],
            env=self._environment(url, Path(os.devnull)),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECS,
        )
        assert done.returncode == 0, f"{self.name}: tampu {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return json.loads(done.stdout)

    def app(self, *arguments: str, url: str, log: Path) -> list[str]:
        """Run `python fleet.py ARGUMENTS` with this release and return the lines it printed."""
        done = subprocess.run(
            [str(self.python), str(APP), *arguments],
            env=self._environment(url, log),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECS,
        )
        assert done.returncode == 0, f"{self.name}: fleet.py {' '.join(arguments)}: {done.stderr}"
        return done.stdout.splitlines()

    def _environment(self, url: str, log: Path) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("TAMPU_", "PYTHON"))}
        return {**kept, "TAMPU_URL": url, "FLEET_LOG": str(log), "FLEET_RELEASE": self.name}


@cache
def this_release() -> Release:
    return Release("this", Path(sys.executable))


@cache
def previous_release() -> Release:
    """The previous release, built at the first call."""
    folder = cache_dir() / "releases" / f"tampu-{VERSION}-{COMMIT}-py{sys.version_info.major}.{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of one test run build it once
        if not (folder / ".installed").exists():
            _build(folder)
    return Release("previous", folder / "bin" / "python")


def _build(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        _check_out(source)
        # With the locked hatchling of this environment, so that the build downloads nothing more.
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch, str(source)])
        wheel = next(Path(scratch).glob("tampu-*.whl"))
        venv.create(folder, with_pip=False, clear=True)
        install = [*pip, "--python", str(folder / "bin" / "python"), "install"]
        _run([*install, "-c", str(source / "constraints.txt"), str(wheel)])
    (folder / ".installed").touch()


def _check_out(folder: Path) -> None:
    git = ["git", "-C", str(PROJECT)]
    if subprocess.run([*git, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True).returncode:
        unavailable(
            f"commit {COMMIT}, from which release {VERSION} is built,",
            "this clone is shallow or no clone: `git fetch --unshallow`, or clone without --depth",
        )
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    _run([*git, "archive", "--output", str(archive), COMMIT, "src", "pyproject.toml", "constraints.txt", "README.md"])
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    # hatchling refuses to build without the licence that pyproject.toml names.
    (folder / "LICENSE").write_bytes((PROJECT / "LICENSE").read_bytes())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        unavailable(f"release {VERSION}", f"`{' '.join(command[:4])}` failed: {done.stderr.strip()[-1000:]}")
