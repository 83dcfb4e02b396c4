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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "deb [trusted=yes] http://mirror.invalid/debian bookworm main\n"),
        ("sources.list.d/debian.sources", DEB822 + "Trusted: yes\n"),
    ],
)
def test_a_machine_that_trusts_an_archive_does_not_make_us_trust_it(
    debian_archive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setattr(debian_archive.shutil, "which", lambda name: name)
    monkeypatch.setattr(debian_archive.Archive, "_apt", lambda *_: "")
    archive = debian_archive.Archive("sid", "deb-src", tmp_path / "scratch", etc_with(tmp_path, name, text))
    written = (archive.folder / "sources" / "private.sources").read_text()
    assert "URIs: http://mirror.invalid/debian\n" in written
    assert "trusted" not in written.lower()


def test_a_disabled_source_is_not_used(debian_archive: Any, tmp_path: Path) -> None:
    disabled = "Enabled: no\nTypes: deb\nURIs: http://mirror.invalid/debian\nSuites: bookworm\nComponents: main\n"
    with pytest.raises(debian_archive.Unavailable, match="no source of the main Debian archive"):
        debian_archive.main_source(etc_with(tmp_path, "sources.list.d/debian.sources", disabled))


@pytest.mark.parametrize(("ci", "exit_code"), [("", 0), ("true", 1)])
def test_a_missing_server_takes_one_line_and_fails_only_in_ci(tmp_path: Path, ci: str, exit_code: int) -> None:
    # A machine without apt, compiler, make or packages to download, and with an empty cache.
    environment = {"PATH": str(tmp_path), "TAMPU_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "CI": ci}
    command = [sys.executable, str(SCRIPTS / "install_servers.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (exit_code, "")
    missing = [line for line in done.stdout.splitlines() if "is not available, its tests are skipped" in line]
    assert [line.split(" is ")[0] for line in missing] == [
        "servers: Redis 6.2",
        "servers: Redis 7.0",
        "servers: Redis 8.6",
    ]


@pytest.mark.parametrize(
    ("user", "answer", "said"),
    [
        (0, "", "installing libssl-dev with apt-get, for TLS (TAMPU_SYSTEM_PACKAGES=no prevents this)"),
        (0, "no", "libssl-dev needed for TLS: run `apt-get install libssl-dev` as root"),
        (1000, "", "libssl-dev needed for TLS: run `apt-get install libssl-dev` as root"),
    ],
)
def test_system_packages_are_printed_with_their_purpose_before_installing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: int, answer: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    system_packages: Any = importlib.import_module("system_packages")
    said_before: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        said_before.append(capsys.readouterr().err)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(system_packages.shutil, "which", lambda name: name)
    monkeypatch.setattr(system_packages.os, "geteuid", lambda: user)
    monkeypatch.setattr(system_packages.subprocess, "run", run)
    monkeypatch.setenv("TAMPU_SYSTEM_PACKAGES", answer)
    installed = system_packages.install(["libssl-dev"], "TLS")
    assert installed == bool(said_before)
    assert (said_before[0] if installed else capsys.readouterr().err) == f"system packages: {said}\n"
