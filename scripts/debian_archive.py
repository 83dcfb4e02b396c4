"""Downloads packages from any suite of the machine's Debian archive, without changing its apt configuration.

It copies the machine's own source entry with a different suite, so that mirrors, keys and proxies apply and no host
name is needed here. Lists and caches are private too: nothing needs root, and nothing is installed.
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


class Unavailable(Exception):  # noqa: N818 - shown as "... is not available: ..."
    """Something is not available on this machine; the message is one line that says why."""


class Archive:
    """One suite of the machine's Debian archive; `kind` is `deb` for packages or `deb-src` for sources."""

    def __init__(self, suite: str, kind: str, scratch: Path, etc: Path = ETC) -> None:
        if not shutil.which("apt-get"):
            raise Unavailable("this is not a Debian system: apt-get is missing")
        self.suite = suite
        self.folder = scratch / f"apt-{suite}"
        for needed in ("sources", "lists/partial", "cache/archives/partial", "downloads"):
            (self.folder / needed).mkdir(parents=True)
        # Only these fields: an architecture or target option of the machine's entry may not exist in another suite.
        # `Trusted` is left out on purpose: what is built from here is verified, whatever the machine itself accepts.
        kept = {field: text for field, text in main_source(etc).items() if field in ("URIs", "Signed-By")}
        entry = {"Types": kind, **kept, "Suites": suite, "Components": "main"}
        text = "".join(f"{field}: {value}\n" for field, value in entry.items())
        (self.folder / "sources" / "private.sources").write_text(text)
        self._apt("update")

    def packages(self, *names: str) -> list[Path]:
        """Download binary packages."""
        self._apt("download", *names)
        return sorted((self.folder / "downloads").glob("*.deb"))

    def source(self, name: str) -> Path:
        """Download a source package, the newest or `name=version`. Return the folder with its .dsc and tarballs.

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
            # Only we can write to this folder, so apt's own sandbox user cannot be used.
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
        # `apt-get update` succeeds even if it could not fetch a list, and reports it only in E: or W: lines.
        complaints = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        if arguments == ("update",):
            complaints += [line for line in done.stderr.splitlines() if "Failed to fetch" in line]
        if done.returncode or complaints:
            said = complaints[0] if complaints else done.stderr.strip() or done.stdout.strip()
            raise Unavailable(f"{program} {arguments[0]} failed in the Debian suite {self.suite}: {said}")
        return done.stdout


def main_source(etc: Path = ETC) -> dict[str, str]:
    """Return the fields of the machine's entry for the main Debian archive, which is recognized by its path.

    The security archive does not have the suites and sources we need, and other archives may use the same suite names.
    """
    for entry in _entries(etc):
        uris = entry.get("URIs", "").split()
        if entry.get("Enabled", "yes") != "no" and any(re.search(r"/debian(/|\.list)?$", uri) for uri in uris):
            return entry
    raise Unavailable("apt has no source of the main Debian archive")


def _entries(etc: Path) -> Iterator[dict[str, str]]:
    """Yield every apt source of the machine, in either format, as the fields of the newer format."""
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
    """Return the fields by name. A line that starts with a space continues the previous field, as in an inline key."""
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
