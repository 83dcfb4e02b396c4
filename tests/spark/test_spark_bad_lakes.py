"""Lakes that cannot be used, and full disks: a clear error, before Spark starts where possible, and nothing lost."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import invoke
from spark.lake_check import differences
from spark.test_spark_lake import NOON, History, jobs_of, ulid
from spark.test_spark_upkeep import SmallLake
from tampu.cli.commands.pipeline import _cause_of
from tampu.spark import session
from tampu.spark.lake import contracts, upkeep
from tampu.spark.lake.bronze import offsets_of
from tampu.spark.lake.folder import LakeVersion, sole_writer
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark.filling import Filled


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if Spark is started."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(session, "find_java_home", lambda: "/java")
    monkeypatch.setattr(session, "spark_session", refuse)


@pytest.fixture
def folder_of_all() -> Iterator[Path]:
    """A folder that all users can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def as_another_user() -> Iterator[None]:
    """Drop the rights of root, whom permissions do not bind."""
    former = os.geteuid()
    if former == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(former)


def complaint(lake: Path | str, url: str, *options: str) -> str:
    done = invoke("pipeline", "run", "--queue", "q", "--lake", str(lake), "--url", url, *options)
    assert done.code == 2
    return done.err.splitlines()[-1]  # a warning that the queue does not exist yet may come first


@pytest.mark.usefixtures("no_session")
class TestBeforeSpark:
    @pytest.mark.slow
    def test_a_lake_of_a_newer_version(self, server: Any, tmp_path: Path) -> None:
        LakeVersion(format=99).publish(tmp_path)
        assert "upgrade tampu" in complaint(tmp_path, server.url)

    def test_a_folder_of_other_files(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "thesis.docx").touch()
        assert "is not a lake" in complaint(tmp_path, server.url)

    def test_a_uri_of_an_unknown_scheme(self, server: Any) -> None:
        assert "a path or a URI of s3, " in complaint("hdfs://bucket/lake", server.url)

    def test_a_path_that_delta_would_decode(self, server: Any, tmp_path: Path) -> None:
        assert "percent escapes" in complaint(tmp_path / "a%20b", server.url)

    def test_two_pipelines_at_once(self, server: Any, tmp_path: Path) -> None:
        with sole_writer(Store.of(tmp_path)):
            assert "another pipeline writes to the lake" in complaint(tmp_path, server.url)

    @pytest.mark.slow
    def test_a_rebuild_beside_a_pipeline(self, tmp_path: Path) -> None:
        LakeVersion().publish(tmp_path)
        with sole_writer(Store.of(tmp_path)):
            done = invoke("pipeline", "rebuild", "--lake", str(tmp_path))
        assert done.code == 2
        assert "another pipeline writes to the lake" in done.err

    def test_a_folder_below_a_file(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "cannot write to" in complaint(tmp_path / "file" / "lake", server.url)

    @pytest.mark.parametrize("mode", [0o555, 0])
    @pytest.mark.parametrize(
        "closed",
        [
            *(".", "lake", "lake/_spark.log"),
        ],
    )
    def test_a_folder_that_the_user_must_not_write(
        self, closed: str, mode: int, server: Any, folder_of_all: Path
    ) -> None:
        lake = folder_of_all / "lake"
        if closed != ".":  # a new lake
            lake.mkdir()
            (lake / "_spark.log").touch()
        for path in (folder_of_all, *folder_of_all.rglob("*")):
            path.chmod(0o777)
        (folder_of_all / closed).chmod(mode)
        with as_another_user():
            said = complaint(lake, server.url)
        assert f"cannot write to {lake if closed == '.' else folder_of_all / closed}: " in said

    @pytest.mark.parametrize("closed", [".", "lake_versions", "bronze/events/_delta_log"])
    def test_a_lake_that_the_user_must_not_read(self, closed: str, folder_of_all: Path) -> None:
        lake = SmallLake(folder_of_all / "lake")
        lake.land("2026-03-01", "a")
        lake.compute()
        for path in (folder_of_all, *folder_of_all.rglob("*")):
            path.chmod(0o777)
        (lake.folder / closed).chmod(0)
        for command in (("show",), ("sql", "SELECT 1")):
            with as_another_user():
                done = invoke("pipeline", *command, "--lake", str(lake.folder))
            assert (done.code, "cannot read" in done.err, closed.strip(".") in done.err) == (2, True, True), done.err

    @pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "deltalake"])
    def test_a_missing_extra(self, missing: str, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "find_spec", lambda name: None if name == missing else object())
        said = complaint(tmp_path, server.url)
        assert f"needs {missing}" in said
        assert "pip install 'tampu[" in said

    def test_contracts_that_are_not_valid(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "rules.toml").write_text("[x")
        assert "rules.toml" in complaint(tmp_path / "lake", server.url, "--contracts", str(tmp_path / "rules.toml"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the kernel refuse to write more than `size` bytes to a file: a write fails halfway, as on a full disk."""
    former = resource.prlimit(0, resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        yield
    finally:
        resource.prlimit(0, resource.RLIMIT_FSIZE, former)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 4 MB; None where the tests must not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tampu-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    yield folder
    # Lazily: the Spark session of all tests may still be closing a file of the failed run.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled_before(place: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill the disk to the last byte just before the files or the commit are written."""
    steps = {"files": (Table, "stage"), "commit": (Table, "commit")}
    owner, name = steps[place]
    step = getattr(owner, name)

    def fill_first(*arguments: Any, **options: Any) -> Any:
        with suppress(OSError), (disk / "filler").open("ab", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        return step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fill_first)
        yield
    (disk / "filler").unlink()


@contextmanager
def limited_workers(spark: Any) -> Iterator[None]:
    """Limit the files of the processes that Java has started: those of executors write the Parquet files."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    ours = {spark.sparkContext._gateway.proc.pid}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    former = {}
    for pid in ours:
        with suppress(ProcessLookupError):
            former[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for pid, limits in former.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@contextmanager
def limited_commits() -> Iterator[None]:
    """Let the commits of tables fail halfway."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "commit", largest_file(500)(Table.commit))
        yield


@pytest.mark.usefixtures("no_session")
def test_a_first_commit_that_fails_leaves_no_table(tmp_path: Path) -> None:
    """delta-rs creates the folder of the log first; a table was taken to exist if it has that folder."""
    lake = SmallLake(tmp_path)
    with limited_commits(), pytest.raises(OSError, match="File too large"):
        lake.land("2026-03-01", "a")
    assert (tmp_path / "bronze/events/_delta_log").is_dir()
    assert lake.events.version() == -1
    for name in ("bronze/dlq", "bronze/repairs", "gold/violations", "lake_versions"):
        (tmp_path / name / "_delta_log").mkdir(parents=True)
    (tmp_path / "bronze/dlq/_delta_log/00000000000000000000.json#1").touch()  # how delta-rs names a draft
    for words in ("show", "sql SELECT-1", "report", "compact", "vacuum", "rebuild"):
        done = invoke("pipeline", *words.split(), "--lake", str(tmp_path))
        assert (done.code, "is not a lake yet" in done.err) == (2, True), words
    lake.land("2026-03-01", "a")
    lake.compute()
    for words in ("show", "sql SELECT-1", "compact", "vacuum", "retain --bronze 90d"):
        done = invoke("pipeline", *words.split(), "--lake", str(tmp_path))
        assert done.code == 0, done.err
    contracts.publish(lake.store, ["q"], [])
    assert set(LakeVersion.load(tmp_path).tables) == {"bronze/events", "silver/jobs", "gold/violations"}


@pytest.mark.spark_session
def test_a_disk_that_is_full_in_the_first_run_loses_nothing(spark: Any, filled: Filled, tmp_path: Path) -> None:
    History(filled).completed(ulid(1, NOON), NOON)
    pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
    with limited_commits(), pytest.raises(OSError, match="File too large"):
        pipeline.run()
    assert (tmp_path / "bronze/events/_delta_log").is_dir()
    assert pipeline.run().landed["events"] == 2
    assert len(jobs_of(tmp_path)) == 1


@pytest.mark.spark_session
@pytest.mark.parametrize("place", ["files", "commit"])
@pytest.mark.parametrize("is_real", [True, False], ids=["disk", "limit"])
def test_a_disk_that_is_full_loses_nothing(
    is_real: bool,
    place: str,
    spark: Any,
    filled: Filled,
    tmp_path: Path,
    small_disk: Path | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = (small_disk or tmp_path) / "lake"
    history = History(filled)
    history.completed(ulid(1, NOON), NOON)
    pipeline = Pipeline(spark, filled.url, ["q"], lake)
    pipeline.run()
    landed = Table(lake, "bronze/events")
    before = landed.version()
    history.completed(ulid(2, NOON), NOON)
    if is_real and small_disk is not None:
        limit, error = filled_before(place, small_disk, monkeypatch), "No space left on device"
    else:  # the kernel refuses large files to any user
        # A commit takes more than 1,000 bytes; processes of Java write the Parquet files.
        limit = limited_workers(spark) if place == "files" else largest_file(500)
        error = "File too large"
    with limit, pytest.raises(Exception, match=error) as caught:
        pipeline.run()
    assert error in _cause_of(caught.value)  # what the command prints
    assert landed.version() == before
    assert len(jobs_of(lake)) == 1  # readers see what was there before
    assert pipeline.run().landed["events"] == 2
    assert len(jobs_of(lake)) == 2
    assert differences(filled.client, ["q"], lake) == {}
    assert offsets_of(landed, ["q"])
    upkeep.vacuum(Store.of(lake), keep_hours=0)
    left = {file["path"] for file in landed.store.list()}
    assert {path for path in left if not path.startswith("_delta_log/")} == {file.path for file in landed.files()}
    assert not [path for path in left if "tmp" in path or "#" in path or path.endswith(".crc")], left
