"""Lakes that cannot be used, and full disks: a clear error, before Spark starts where possible, and nothing lost."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import invoke
from spark.lake_check import differences
from spark.test_spark_lake import NOON, History, jobs_of, ulid
from tampu.spark import session
from tampu.spark.lake.bronze import OffsetLog
from tampu.spark.lake.folder import sole_writer
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.table import Table
from tampu.spark.lake.versions import LakeVersion

if TYPE_CHECKING:
    from pathlib import Path

    from spark.filling import Filled


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if Spark is started."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(session, "find_java_home", lambda: "/java")
    monkeypatch.setattr(session, "spark_session", refuse)


def complaint(lake: Path | str, url: str, *options: str) -> str:
    done = invoke("pipeline", "run", "--queue", "q", "--lake", str(lake), "--url", url, *options)
    assert done.code == 2
    return done.err.splitlines()[-1]  # a warning that the queue does not exist yet may come first


@pytest.mark.usefixtures("no_session")
class TestBeforeSpark:
    def test_a_lake_of_a_newer_version(self, server: Any, tmp_path: Path) -> None:
        LakeVersion(format=99).publish(tmp_path)
        assert "upgrade tampu" in complaint(tmp_path, server.url)

    def test_a_folder_of_other_files(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "thesis.docx").touch()
        assert "is not a lake" in complaint(tmp_path, server.url)

    def test_a_uri(self, server: Any) -> None:
        assert "object stores are not supported" in complaint("s3://bucket/lake", server.url)

    def test_a_path_that_delta_would_decode(self, server: Any, tmp_path: Path) -> None:
        assert "percent escapes" in complaint(tmp_path / "a%20b", server.url)

    def test_two_pipelines_at_once(self, server: Any, tmp_path: Path) -> None:
        with sole_writer(tmp_path):
            assert "another pipeline writes to the lake" in complaint(tmp_path, server.url)

    def test_a_folder_that_cannot_be_written(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()  # not a matter of permissions, which do not bind root
        assert "cannot write to the lake" in complaint(tmp_path / "file" / "lake", server.url)

    @pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "deltalake"])
    def test_a_missing_extra(self, missing: str, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "find_spec", lambda name: None if name == missing else object())
        said = complaint(tmp_path, server.url)
        assert f"needs {missing}" in said
        assert "pip install 'tampu[" in said

    def test_contracts_that_are_not_valid(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "rules.toml").write_text("[x")
        assert "rules.toml" in complaint(tmp_path / "lake", server.url, "--contracts", str(tmp_path / "rules.toml"))


@pytest.mark.spark_session
@pytest.mark.parametrize("place", ["offsets", "files", "commit"])
def test_a_disk_that_is_full_loses_nothing(
    place: str, spark: Any, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(filled)
    history.completed(ulid(1, NOON), NOON)
    pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
    pipeline.run()
    history.completed(ulid(2, NOON), NOON)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if place == "offsets":
            patched.setattr("tampu.spark.lake.bronze.os.fsync", full)
        elif place == "files":
            stage = Table.stage

            def torn(self: Table, *arguments: Any, **options: Any) -> None:
                """Leave the files, and one that is not complete, as a full disk does."""
                stage(self, *arguments, **options)
                next(self.path.glob(f"queue=*/*/v{self.version() + 1:010d}*.parquet")).write_bytes(b"PAR1")
                full()

            patched.setattr(Table, "stage", torn)
        else:
            patched.setattr("tampu.spark.lake.table.DeltaTable.create_write_transaction", full)
        with pytest.raises(OSError, match="No space left"):
            pipeline.run()
        assert len(jobs_of(tmp_path)) == 1  # readers see what was there before
    assert pipeline.run().landed["events"] == 2
    assert len(jobs_of(tmp_path)) == 2
    assert differences(filled.client, ["q"], tmp_path) == {}
    assert OffsetLog(tmp_path, "events").read(Table(tmp_path, "bronze/events").transaction("tampu.landing"))
