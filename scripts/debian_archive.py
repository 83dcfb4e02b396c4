"""Downloads packages of any suite of the Debian archive this machine already uses, without touching its apt.

The private source is the machine's own with another suite, so mirrors, keys and proxies stay the machine's own, and no
host name need be written here. Lists and caches are private too: nothing needs root, nothing is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ETC = Path("/etc")


class Unavailable(Exception):  # noqa: N818 - said to people as "... is not available: ..."
    """Something cannot be had on this machine; the text is one line that says why."""


class Archive:
    """One suite of the machine's Debian archive; `kind` is `deb` for packages or `deb-src` for sources."""

    def __init__(self, suite: str, kind: str, scratch: Path, etc: Path = ETC) -> None:
        if not shutil.which("apt-get"):
            raise Unavailable("this is not a Debian system (there is no apt-get)")
        self.suite = suite
        self.folder = scratch / f"apt-{suite}"
        for needed in ("sources", "lists/partial", "cache/archives/partial", "downloads"):
            (self.folder / needed).mkdir(parents=True)
        # Only these: an architecture or target option of the machine's entry need not exist in another suite. `Trusted`
        # is left out on purpose: whatever the machine accepts for itself, what is built from here is verified.
        kept = {field: text for field, text in main_source(etc).items() if field in ("URIs", "Signed-By")}
        entry = {"Types": kind, **kept, "Suites": suite, "Components": "main"}
        text = "".join(f"{field}: {value}\n" for field, value in entry.items())
        (self.folder / "sources" / "private.sources").write_text(text)
        self._apt("update")

    def packages(self, *names: str) -> list[Path]:
        """Downloads binary packages."""
        self._apt("download", *names)
        return sorted((self.folder / "downloads").glob("*.deb"))

    def source(self, name: str) -> Path:
        """Downloads a source package, the newest or `name=version`; returns the folder with its .dsc and tarballs.

        apt has verified their checksums.
        """
        self._apt("source", "--download-only", name)
        return self.folder / "downloads"

    def source_versions(self, name: str) -> list[str]:
        """The versions of a source package that the suite lists, the newest first. A suite may list several."""
        shown = self._apt("showsrc", "--only-source", name, program="apt-cache")
        found = set(re.findall(r"^Version: (\S+)$", shown, re.MULTILINE))
        return sorted(found, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], reverse=True)

    def _apt(self, *arguments: str, program: str = "apt-get") -> str:
        settings = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": str(self.folder / "sources"),
            "Dir::State::Lists": str(self.folder / "lists"),
            "Dir::Cache": str(self.folder / "cache"),
            # The folder is ours alone, so apt's own sandbox user could not write to it.
            "APT::Sandbox::User": "root",
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        done = subprocess.run(
            [program, "--quiet", *options, *arguments],
            cwd=self.folder / "downloads",
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
        )
        # `apt-get update` succeeds although it could not fetch a list; it says so with E: or W: lines only.
        complaints = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        if arguments == ("update",):
            complaints += [line for line in done.stderr.splitlines() if "Failed to fetch" in line]
        if done.returncode or complaints:
            said = complaints[0] if complaints else done.stderr.strip() or done.stdout.strip()
            raise Unavailable(f"{program} {arguments[0]} failed in Debian's suite {self.suite}: {said}")
        return done.stdout


def main_source(etc: Path = ETC) -> dict[str, str]:
    """The fields of the machine's entry for the main Debian archive.

    The security archive has neither the suites nor the sources we look for, and further archives may use the same
    suite names; the main one is known by its path.
    """
    for entry in _entries(etc):
        uris = entry.get("URIs", "").split()
        if entry.get("Enabled", "yes") != "no" and any(re.search(r"/debian(/|\.list)?$", uri) for uri in uris):
            return entry
    raise Unavailable("apt has no source of the main Debian archive")


def _entries(etc: Path) -> Iterator[dict[str, str]]:
    """Every apt source of the machine, in either format, as the fields of the newer one."""
    for path in sorted((etc / "apt/sources.list.d").glob("*.sources")):
        for paragraph in re.split(r"\n\s*\n", path.read_text()):
            yield _deb822(paragraph)
    for path in [etc / "apt/sources.list", *sorted((etc / "apt/sources.list.d").glob("*.list"))]:
        for line in path.read_text().splitlines() if path.is_file() else ():
            if found := re.match(r"deb(?:-src)?\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+\S+", line):
                options = dict(option.split("=", 1) for option in (found["options"] or "").split() if "=" in option)
                signed_by = options.get("signed-by")
                yield {"URIs": found["uri"]} | ({"Signed-By": signed_by} if signed_by else {})


def _deb822(paragraph: str) -> dict[str, str]:
    """Fields by name. A line that begins with a space continues the field above it, as in a key given inline."""
    fields: dict[str, str] = {}
    name = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        if line[:1].isspace() and name:
            fields[name] += "\n" + line
        elif ":" in line:
            name, _, text = line.partition(":")
            fields[name] = text.strip()
    return fields
