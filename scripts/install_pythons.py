"""Builds CPython from Debian's source packages into the cache and prints the path of each interpreter.

    python scripts/install_pythons.py 3.13 3.14

Each is built once, without profile-guided optimisation: about 3 minutes on two cores. The sources are upstream's
tarballs as Debian ships them; apt verifies them, or the checksum below does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import system_packages
from debian_archive import Archive, Unavailable, main_source

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.binaries import cache_dir

SUITE = "sid"

#: A release whose tarball is known, by file name and SHA-256. Mirrors keep a source for a while after the index has
#: moved on, and some follow the index only days later: it is asked for when the index lists nothing that is there.
KNOWN = {
    "3.13": ("python3.13_3.13.15.orig.tar.xz", "1e66a7945a48390ee4c2a4268a0e4185884059a13c4aab6d148aa208deea4a76"),
    "3.14": ("python3.14_3.14.7.orig.tar.xz", "3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81"),
}

#: Headers without which CPython builds and lacks modules that the tests use: each with the module and its package.
HEADERS = {
    "openssl/ssl.h": ("ssl", "libssl-dev"),
    "ffi.h": ("ctypes", "libffi-dev"),
    "zlib.h": ("zlib", "zlib1g-dev"),
    "bzlib.h": ("bz2", "libbz2-dev"),
    "lzma.h": ("lzma", "liblzma-dev"),
    "sqlite3.h": ("sqlite3", "libsqlite3-dev"),
}


def main(versions: list[str]) -> int:
    for version in versions:
        try:
            print(install(version), flush=True)
        except (Unavailable, subprocess.CalledProcessError, OSError) as reason:
            print(f"pythons: Python {version} is not available: {reason}", file=sys.stderr, flush=True)
            return 1
    return 0


def install(version: str) -> Path:
    """Return the interpreter of this version from the cache; the first call builds it."""
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"python-{version}"
    python = target / "bin" / f"python{version}"
    with (cache / f"python-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once build it once
        if python.exists():
            return python
        say(f"Python {version}: building it once, about 3 minutes (into {target})")
        began = time.monotonic()
        # In the cache and not in /tmp: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=f"python-{version}-", dir=cache) as scratch:
            _build(version, target, Path(scratch))
        say(f"Python {version} is ready after {time.monotonic() - began:.0f} s")
    return python


def say(line: str) -> None:
    print(f"pythons: {line}", file=sys.stderr, flush=True)


def _build(version: str, target: Path, scratch: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which("make"):
        raise Unavailable("building it needs make and a C compiler (apt install build-essential)")
    _require_headers(compiler)
    source = scratch / "source"
    source.mkdir()
    tarball = _tarball(version, scratch)
    subprocess.run(["tar", "--extract", "--strip-components=1", "--file", tarball, "--directory", source], check=True)
    # This may run below `make test-pythons`, whose flags are not meant for this make.
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    root = scratch / "root"
    for command in (
        ["./configure", f"--prefix={target}", "--disable-test-modules", "--without-static-libpython"],
        ["make", "-j2"],
        ["make", "install", f"DESTDIR={root}"],
    ):
        done = subprocess.run(
            command, cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            say("\n".join(done.stdout.splitlines()[-30:]))
            raise Unavailable(f"`{' '.join(command[:2])}` failed; its last lines are above")
    built = root / target.relative_to("/")
    modules = ", ".join(module for module, _ in HEADERS.values())
    subprocess.run([built / "bin" / f"python{version}", "-c", f"import {modules}"], check=True)
    shutil.rmtree(target, ignore_errors=True)
    built.rename(target)


def _require_headers(compiler: str) -> None:
    missing = [package for header, (_, package) in HEADERS.items() if not _compiles(compiler, header)]
    if missing and not system_packages.install(missing, "building CPython with the modules that the tests use"):
        raise Unavailable(f"building it needs {' '.join(missing)}")


def _compiles(compiler: str, header: str) -> bool:
    probe = [compiler, "-E", "-x", "c", "-"]
    return subprocess.run(probe, input=f"#include <{header}>\n".encode(), capture_output=True).returncode == 0


def _tarball(version: str, scratch: Path) -> Path:
    """Download the newest source the mirror really has: by apt from the suite's index, or else the known one."""
    package = f"python{version}"
    refusal = "the index lists none"
    archive = Archive(SUITE, "deb-src", scratch)
    for release in archive.source_versions(package):
        try:
            return next(archive.source(f"{package}={release}").glob(f"{package}_*.orig.tar.*[!c]"))
        except Unavailable as reason:
            refusal = str(reason)
    name, checksum = KNOWN.get(version, ("", ""))
    if not name:
        raise Unavailable(refusal)
    say(f"the mirror lacks what its index lists ({refusal}); trying {name}")
    path = scratch / name
    with urllib.request.urlopen(f"{_mirror()}/pool/main/p/{package}/{name}", timeout=60) as answer:
        path.write_bytes(answer.read())
    if hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
        raise Unavailable(f"the mirror's {name} has not the SHA-256 that this script expects")
    return path


def _mirror() -> str:
    uri = main_source()["URIs"].split()[0].rstrip("/")
    if not uri.startswith(("http://", "https://")):
        raise Unavailable(f"the machine's apt source {uri} is not a plain mirror")
    return uri


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
