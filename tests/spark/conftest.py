"""Fixtures of the Spark tests: one session for the whole run, and queues with known contents.

Tiers: files without the fixture `spark` test plain classes and need no Java; those with it share one session of
`local[2,4]` (a failed task is tried again, as on a cluster); those marked `spark_cluster` start a standalone cluster.
`make test` runs the first, and of the others those marked `spark_slice`; `make test-spark` runs all.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from servers.require import require
from spark.filling import Filled

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Without the extra `spark` none of these can be imported.
collect_ignore_glob = [] if find_spec("pyspark") and find_spec("pyarrow") else ["test_*.py"]

#: For the Javas of tests, which live for seconds: compiling thoroughly would take longer than it saves, and looking
#: for faults in Spark's own classes is a quarter of a start.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
#: Of these files the first test with a session, and those without one, are part of `make test`, whatever their names.
FIRST_OF = ("test_spark_lake", "test_spark_worker")
#: How long a test with Spark may take on a busy machine; the first one starts the session.
SPARK_TIMEOUT_SECS = 600


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the markers added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """All tests with Spark get the time it needs, unless they say otherwise.

    Two processes run them: those with the shared session are for one, those that start programs for another. Each
    leaves a core idle for half of its time.
    """
    for name in FIRST_OF:
        of_file = [item for item in items if name in item.nodeid]
        with_session = [item for item in of_file if "spark" in item.fixturenames]
        for item in of_file:
            if item in with_session[:1] or item not in with_session:
                item.add_marker(pytest.mark.spark_slice)
    for item in items:
        shares_session = "spark" in item.fixturenames
        starts_programs = item.get_closest_marker("spark_cluster") or item.get_closest_marker("spark_session")
        if (shares_session or starts_programs) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_SECS))
        if shares_session or starts_programs:
            item.add_marker(pytest.mark.xdist_group("session" if shares_session else "programs"))
    # A group is one piece of work for one process: the largest first, so that the others have work meanwhile.
    items.sort(key=lambda item: "spark" not in item.fixturenames)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one Spark session of the run."""
    require("java")
    from tampu.spark import spark_session

    folder = tmp_path_factory.mktemp("spark")
    session = spark_session(
        "tampu-tests",
        master="local[2,4]",
        conf={
            "spark.driver.memory": "700m",
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
        },
    )
    yield session
    session.stop()


@pytest.fixture
def filled(server: Any) -> Filled:
    """Fills the streams of a queue directly, entry by entry."""
    return Filled(server)
