"""A Spark session with settings that fit: Java found, the same Python everywhere, times in UTC, tasks tried again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tampu.errors import ConfigError
from tampu.spark.java import find_java_home, use_java

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
    use_java()
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

    text = QUICK_PYTHON.format(python=sys.executable)
    name = f"python-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    program = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tampu" / "spark" / name
    if not Path(pyspark.__file__).is_file() or os.name == "nt":
        return sys.executable
    try:
        if not program.exists():
            program.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: another process may be starting it.
            draft = program.with_name(f"{name}.{os.getpid()}")
            draft.write_text(text)
            draft.chmod(0o755)
            draft.replace(program)
    except OSError:
        return sys.executable
    return str(program)


def _master(master: str | None) -> str:
    return master or os.environ.get(MASTER_VARIABLE) or DEFAULT_MASTER


def _is_local(master: str | None) -> bool:
    return _master(master).startswith("local")
