"""The code of docs/spark.md runs as it stands, on a small server instead of the reader's."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import invoke
from docs.doc_pages import DOCS, blocks_of
from spark.test_spark_repair import CLUSTER, bad_letters
from tampu.cli.commands import pipeline as commands
from tampu.spark.lake.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spark.filling import Filled

PAGE = DOCS / "spark.md"
#: Blocks that need a cluster, or more than a test has.
NOT_RUN = ("SparkWorker", "worker app:queue", "--every", "s3://", "spark.run import")


def commands_of(*, run_spark: bool) -> Iterator[list[str]]:
    """Yield the commands of the page, those that start Spark or the others."""
    for block in blocks_of(PAGE):
        text = block.text.replace("\\\n", " ")
        if block.kind or any(words in text for words in NOT_RUN):
            continue
        for line in text.splitlines():
            if line.startswith("tampu "):
                command = shlex.split(line, comments=True)[1:]
                if (command[:2] == ["pipeline", "run"]) == run_spark:
                    yield command


def prepared(filled: Filled, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TAMPU_URL", filled.url)
    filled.events(20, "emails")
    for number in range(3):
        bad_letters(filled, 1, first=number, queue="billing")
    (toml,) = [block.text for block in blocks_of(PAGE) if block.kind == "toml"]
    (folder / "contracts.toml").write_text(toml)


@pytest.mark.spark_session
def test_the_commands_of_the_guide_work(
    spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(filled, tmp_path, monkeypatch)
    # Each of them would start its own session: what they say is checked, and one run stands for all.
    for command in commands_of(run_spark=True):
        given: list[Any] = []
        monkeypatch.setattr(commands, "build_lake", lambda *a, given=given, **k: given.append((a, k)))
        assert invoke(*command).code == 0, command
        assert len(given) == 1
    Pipeline(spark, filled.url, ["emails", "billing"], tmp_path / "lake").run()
    seen = []
    for command in commands_of(run_spark=False):
        real = [CLUSTER if part == "5be1c1d0" else part for part in command]
        done = invoke(*real)
        assert done.code == 0, (command, done.err)
        seen.append(" ".join(command[:2]))
    assert {"pipeline show", "pipeline sql", "pipeline report", "dlq repair", "pipeline check"} <= set(seen)
    assert (tmp_path / "report.html").exists()


@pytest.mark.spark_session
def test_the_python_of_the_guide_works(
    spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(filled, tmp_path, monkeypatch)
    Pipeline(spark, filled.url, ["emails", "billing"], tmp_path / "lake").run()
    df = spark.sql("SELECT 7 AS user_id, 'basic' AS plan, current_timestamp() AS due")
    names: dict[str, Any] = {"spark": spark, "df": df}
    ran = 0
    for block in blocks_of(PAGE):
        if block.kind != "python" or any(words in block.text for words in NOT_RUN):
            continue
        text = block.text.replace('"redis://127.0.0.1:6379"', repr(filled.url)).replace("5be1c1d0", CLUSTER)
        # Executors do not have the environment variables of this test.
        text = re.sub(r'format\(\s*"tampu"\s*\)', f'format("tampu").option("url", {filled.url!r})', text)
        exec(compile("\n" * (block.line - 1) + text, str(PAGE), "exec"), names)
        ran += 1
    assert ran == 4
    payloads = filled.payloads("billing")
    assert {"user_id": 7, "plan": "basic"} in payloads
    assert [payload["amount"] for payload in payloads if "amount" in payload] == [0.0, 1.0, 2.0]
