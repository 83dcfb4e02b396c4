"""Each extra installs all that its feature needs: the feature runs in an environment with nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

import tampu
from spark.filling import Filled

if TYPE_CHECKING:
    from servers.process import Server

#: A program that uses the extra. It finds the URL of a server in TAMPU_URL.
USES = {
    "": 'assert run("add", "q", "hello", "1") == run("inspect", "q") == run("worker", "list", "q") == 0',
    "embedded": """
from tampu import Queue

with Queue("q", url="embedded://").sync as sync:
    sync.add("hello", 1)
""",
    "crypto": """
from tampu import EncryptedCodec, Queue

with Queue("q", codec=EncryptedCodec({"1": bytes(32)})).sync as sync:
    sync.add("hello", 1)
""",
    "dashboard": """
import asyncio, os
from tampu.dashboard import dashboard

app = dashboard(os.environ["TAMPU_URL"], authorize=lambda request: None)
sent = []

async def receive():
    return {"type": "http.request", "body": b"", "more_body": False}

async def send(message):
    sent.append(message)

scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
asyncio.run(app(scope | {"root_path": "", "server": None, "client": None, "scheme": "http"}, receive, send))
assert sent[0]["status"] == 403
""",
    "connector": """
from tampu.spark.read.decode import decode_events

(row,) = decode_events("q", [(b"1-0", [b"e", b"completed", b"id", b"a", b"ts", b"5"])], "json").to_pylist()
assert row["job_id"] == "a"
""",
    "lake": """
from tampu.wire.dlq import cluster_id

cluster = cluster_id("retries_exhausted", "ValueError", "no")
sql = "SELECT _entry_id, 2 AS n FROM letters"
assert run("dlq", "repair", "q", "--cluster", cluster, "--sql", sql, "--dry-run") == 0
from tampu.spark.lake import report, upkeep
""",
    "spark": """
from tampu.spark import TampuDataSource, read_table, spark_session
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.worker import SparkWorker
""",
    "metrics": "from tampu.prometheus import PrometheusSink; PrometheusSink()",
    "sqlalchemy": "import tampu.contrib.sqlalchemy",
    "django": "import tampu.contrib.django, tampu.contrib.django.tasks",
}
START = """
import sys
sys.path.insert(0, sys.argv.pop())
from tampu.cli.main import main

def run(*arguments):
    sys.argv = ["tampu", *arguments]
    try:
        main()
    except SystemExit as exit:
        return exit.code or 0
    return 0

"""


def installed_with(extra: str) -> set[str]:
    """Return the names of the packages that `pip install tampu[extra]` installs."""
    found: set[str] = set()
    waiting = [("tampu", extra)]
    while waiting:
        name, wanted = waiting.pop()
        found.add(name)
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": wanted}):
                more = [(needed.name, one) for one in ("", *needed.extras)]
                waiting += [one for one in more if one[1] or one[0] not in found]
    return found


def environment(folder: Path, names: set[str]) -> None:
    """Make a folder that holds these packages and no others."""
    (folder / "tampu").symlink_to(Path(tampu.__file__).parent)
    for name in names:
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(distribution(name).locate_file(top)))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


@pytest.mark.slow
@pytest.mark.parametrize("extra", USES)
def test_an_extra_installs_all_that_its_feature_needs(extra: str, server: Server, tmp_path: Path) -> None:
    environment(tmp_path, installed_with(extra))
    Filled(server).letter("a", {"n": 1})
    command = [sys.executable, "-I", "-S", "-c", START + USES[extra], str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"TAMPU_URL": server.url})
    assert done.returncode == 0, done.stderr


def test_every_extra_is_used() -> None:
    declared = distribution("tampu").metadata.get_all("Provides-Extra")
    assert declared is not None
    assert {*declared} - {"dev"} == {*USES} - {""}
