"""`make servers`: where Debian packages are fetched from, and the message when a server is unavailable."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

DEB822 = """\
Types: deb
URIs: http://mirror.invalid/debian-security
Suites: bookworm-security
Components: main

# A comment: not a field.
Types: deb deb-src
URIs: http://mirror.invalid/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBGPL0BUBEADmW5NdOOHwPIJlgPu6JDcKw/NZJPR8lsD3K87ZM18gzyQZJD+w
"""

ONE_LINE = """\
# deb http://old.invalid/debian bookworm main
deb http://other.invalid/tools bookworm main
deb http://mirror.invalid/debian-security bookworm-security main
deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://mirror.invalid/debian/ bookworm main non-free
"""


@pytest.fixture
def debian_archive(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("debian_archive")


def etc_with(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / "apt" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return tmp_path


def test_the_main_archive_is_found_among_deb822_sources(debian_archive: Any, tmp_path: Path) -> None:
    source = debian_archive.main_source(etc_with(tmp_path, "sources.list.d/debian.sources", DEB822))
    assert source["URIs"] == "http://mirror.invalid/debian"
    assert source["Signed-By"].splitlines()[1:3] == [" -----BEGIN PGP PUBLIC KEY BLOCK-----", " ."]


@pytest.mark.parametrize("name", ["sources.list", "sources.list.d/debian.list"])
def test_the_main_archive_is_found_among_one_line_sources(debian_archive: Any, tmp_path: Path, name: str) -> None:
    source = debian_archive.main_source(etc_with(tmp_path, name, ONE_LINE))
    assert source == {"URIs": "http://mirror.invalid/debian/", "Signed-By": "/usr/share/keyrings/a.gpg"}


def test_a_disabled_source_is_not_used(debian_archive: Any, tmp_path: Path) -> None:
    disabled = "Enabled: no\nTypes: deb\nURIs: http://mirror.invalid/debian\nSuites: bookworm\nComponents: main\n"
    with pytest.raises(debian_archive.Unavailable, match="no source of the main Debian archive"):
        debian_archive.main_source(etc_with(tmp_path, "sources.list.d/debian.sources", disabled))


@pytest.mark.parametrize(("ci", "exit_code"), [("", 0), ("true", 1)])
def test_a_missing_server_takes_one_line_and_fails_only_in_ci(tmp_path: Path, ci: str, exit_code: int) -> None:
    # A machine without apt, compiler or make, and with an empty cache.
    environment = {"PATH": str(tmp_path), "TAMPU_CACHE": str(tmp_path / "cache"), "CI": ci}
    command = [sys.executable, str(SCRIPTS / "install_servers.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (exit_code, "")
    missing = [line for line in done.stdout.splitlines() if "is not available, its tests are skipped" in line]
    assert [line.split(" is ")[0] for line in missing] == ["servers: Redis 7.0", "servers: Redis 8.6"]
