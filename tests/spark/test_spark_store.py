"""Lakes in an object store: SeaweedFS, and what a store may do wrong."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cli.lab import invoke
from servers.seaweed import Handler, SeaweedFS, failing, proxy
from spark.lake_check import differences
from spark.test_spark_lake import NOON, History, fill, ulid
from spark.test_spark_tables import SCHEMA
from spark.test_spark_upkeep import TODAY, SmallLake
from tampu.errors import ConfigError
from tampu.spark import read_table
from tampu.spark.lake.folder import LakeVersion, writable_lake
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.rows import query
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import Table
from tampu.spark.lake.upkeep import compact, retain, vacuum

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spark.filling import Filled

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("seaweed")]


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.close()


@pytest.fixture
def uri(request: pytest.FixtureRequest) -> str:
    return f"s3://lake/{abs(hash(request.node.nodeid))}"


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, uri: str) -> Store:
    if request.param == "folder":
        return Store.of(tmp_path / "lake")
    return Store.of(uri, request.getfixturevalue("seaweed").options())


def test_a_store_reads_what_it_wrote(store: Store) -> None:
    assert list(store.list()) == []
    assert store.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        store.read("a/b")
    store.put("a/b", b"one")
    # As an executor gets it.
    other = pickle.loads(pickle.dumps(store / "a"))
    assert (other.read("b"), other.size("b"), [file["path"] for file in store.list()]) == (b"one", 3, ["a/b"])
    store.delete(["a/b"])
    assert store.size("a/b") is None


def test_options_are_not_shown(seaweed: SeaweedFS) -> None:
    store = Store.of("s3a://lake/x/", seaweed.options())
    assert (store.uri, repr(store), str(store)) == ("s3://lake/x", "Store(uri='s3://lake/x')", "s3://lake/x")


def test_upkeep_works_in_a_bucket(seaweed: SeaweedFS, uri: str) -> None:
    store = Store.of(uri, seaweed.options())
    lake = SmallLake(store)
    for job in "abc":
        lake.land("2026-03-01", job, queue="média/50%")
    lake.land("2020-01-01", "old")
    lake.compute()
    before = lake.rows()
    assert compact(store).merged == 3
    assert lake.rows() == before
    assert retain(store, 365, today=TODAY).retired["events"] == 1
    assert vacuum(store, keep_hours=0).deleted == 6  # two of them of lake_versions
    assert lake.rows()["bronze/events"] == ["a", "b", "c"]
    paths = [file["path"] for file in lake.events.store.list() if file["path"].endswith(".parquet")]
    assert [path for path in paths if not path.startswith("_")] == [file.path for file in lake.events.files()]


def test_commands_take_storage_options_or_the_environment(
    seaweed: SeaweedFS, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = SmallLake(Store.of(uri, seaweed.options()))
    lake.land("2026-03-01", "a")
    lake.compute()
    options = [part for pair in seaweed.options().items() for part in ("--storage-option", "=".join(pair))]
    select = ("sql", "SELECT job_id FROM bronze_events", "--json")
    for command in (select, ("show",), ("compact",), ("vacuum",)):
        done = invoke("pipeline", *command, "--lake", uri, *options)
        assert done.code == 0, done.err
    for key, value in seaweed.options().items():
        monkeypatch.setenv(key.upper(), value)
    assert json.loads(invoke("pipeline", *select, "--lake", uri).out) == [{"job_id": "a"}]
    done = invoke("pipeline", "show", "--lake", uri, "--storage-option", "secret")
    assert (done.code, "takes key=value" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"aws_secret_access_key": "wrong"}, "cannot write to s3://"),
        ({"aws_access_key_id": "reader", "aws_secret_access_key": "reader-secret"}, "cannot write to s3://"),
        ({"aws_endpoint_url": "http://127.0.0.1:1"}, "cannot write to s3://"),
    ],
)
def test_a_store_that_cannot_be_written_is_said_at_once(
    change: dict[str, str], said: str, seaweed: SeaweedFS, uri: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        writable_lake(uri, seaweed.options() | change)
    assert "secret" not in str(caught.value)
    if "aws_access_key_id" not in change:  # the reader may read
        with pytest.raises(ConfigError, match="cannot read s3://"):
            LakeVersion.load(Store.of(uri, seaweed.options() | change))


def test_a_store_that_ignores_conditional_writes_is_refused(seaweed: SeaweedFS, uri: str) -> None:
    def ignore(handler: Handler) -> bool:
        if handler.headers["If-None-Match"] is None:
            return False
        handler.forward()
        handler.send_response(200)
        handler.send_header("ETag", '"1"')
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    with proxy(seaweed, ignore) as url, pytest.raises(ConfigError, match="overwrites files although"):
        writable_lake(uri, seaweed.options(url=url))


def test_a_store_that_fails_now_and_then_loses_and_doubles_nothing(seaweed: SeaweedFS, uri: str) -> None:
    """A commit whose answer is lost is tried again by the client: it must not be taken for another pipeline's."""
    with proxy(seaweed, failing(0.2)) as url:
        store = Store.of(uri, seaweed.options(url=url))
        table, landed = Table(store, "gold/slo"), 0
        rows = pa.table({"n": pa.array([1], pa.int64()), "queue": ["q"], "day": ["d"]})
        for number in range(20):
            try:
                table.commit(table.write(rows), SCHEMA, {"app": number})
            except (ConfigError, OSError):  # it may have been done: the log says so
                table = Table(store, "gold/slo")
            landed += 1
            if table.transaction("app") < number:
                landed -= 1
    assert sum(file.rows for file in Table(Store.of(uri, seaweed.options()), "gold/slo").files()) == landed
    assert landed > 15


@pytest.mark.spark_session
def test_a_lake_in_a_bucket_equals_the_computation(
    spark: Any, filled: Filled, seaweed: SeaweedFS, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(filled)
    store = Store.of(uri, seaweed.options())
    pipeline = Pipeline(spark, filled.url, ["q"], uri, storage_options=seaweed.options())
    assert pipeline.run().landed == {"events": 87, "dlq": 2}
    History(filled).completed(ulid(100, NOON), NOON, wait_ms=9)
    pipeline.run()
    assert differences(filled.client, ["q"], store) == {}
    assert read_table(spark, uri, "silver/jobs", seaweed.options()).count() == 42
    assert query(store, "SELECT count(*) AS n FROM silver_jobs").to_pylist() == [{"n": 42}]
    assert not any("writer-secret" in text for text in _texts(store))
    # A wrong default file system, as on YARN, makes no difference: no file goes through Hadoop.
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.defaultFS", "hdfs://127.0.0.1:1")
    try:
        History(filled).completed(ulid(101, NOON), NOON)
        pipeline.run()
    finally:
        hadoop.set("fs.defaultFS", "file:///")
    assert differences(filled.client, ["q"], store) == {}


def _texts(store: Store) -> Iterator[str]:
    for file in store.list():
        if file["path"].endswith(".json"):
            yield store.read(file["path"]).decode()
