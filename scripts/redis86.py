"""Builds Redis 8.6 from the source package in Debian's experimental suite, and keeps only the programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import system_packages
from debian_archive import Archive, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

SUITE = "experimental"
PROGRAMS = ("redis-server", "redis-cli", "redis-benchmark", "redis-sentinel")


def install(folder: Path, scratch: Path) -> None:
    """Build redis-server and its tools into `folder`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which("make"):
        raise Unavailable("building it needs make and a C compiler (apt install build-essential)")
    downloads = Archive(SUITE, "deb-src", scratch).source("redis")
    # The unmodified upstream tarball: Debian's patches only concern Debian's own libraries and paths. It is unpacked
    # with tar, because dpkg-source may be missing.
    source = scratch / "source"
    source.mkdir()
    tarball = next(downloads.glob("redis_*.orig.tar.*"))
    subprocess.run(["tar", "--extract", "--strip-components=1", "--file", tarball, "--directory", source], check=True)
    _build(source, tls=_have_openssl(compiler))
    for program in PROGRAMS:
        shutil.copy2(source / "src" / program, folder / program)


def _build(source: Path, *, tls: bool) -> None:
    # `make servers` may have started this; its flags must not reach this make.
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    # Only the server: the modules of Redis 8 need more tools and are not used.
    settings = ["MALLOC=jemalloc", "USE_SYSTEMD=no", f"BUILD_TLS={'yes' if tls else 'no'}"]
    built = subprocess.run(
        ["make", "-j2", *settings],
        cwd=source,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if built.returncode:
        print("\n".join(built.stdout.splitlines()[-30:]))
        raise Unavailable("the build failed; its last lines are above")


def _have_openssl(compiler: str) -> bool:
    """Return whether OpenSSL's headers are available; as root, install them if necessary."""
    if not _compiles(compiler):
        system_packages.install(["libssl-dev"], "TLS in Redis 8.6, which is built here")
    if _compiles(compiler):
        return True
    print("servers: Redis 8.6 is built without TLS because libssl-dev is missing (apt install libssl-dev)", flush=True)
    return False


def _compiles(compiler: str) -> bool:
    probe = [compiler, "-E", "-x", "c", "-"]
    return subprocess.run(probe, input=b"#include <openssl/ssl.h>\n", capture_output=True).returncode == 0
