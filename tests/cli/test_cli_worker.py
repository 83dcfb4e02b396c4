"""`tampu worker` supervises, drains, abandons, restarts and reloads its processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from cli.lab import invoke, run_program, start, worker_program
from servers.liveness import is_alive
from servers.process import eventually
from support.lines import whole_lines
from tampu import ConsumerConfig, Queue
from tampu.base.event_loop import SIGNAL_SECS
from tampu.cli.commands.worker import supervisor
from tampu.cli.commands.worker.child import build_worker
from tampu.cli.commands.worker.command import python_files
from tampu.cli.commands.worker.protocol import WorkerPlan
from tampu.cli.commands.worker.supervisor import DRAIN_GRACE_SECS
from tampu.cli.errors import UsageError, exit_code_of, line_of
from tampu.metrics import noop_sink
from tampu.prometheus import PrometheusSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server

PROJECT = Path(__file__).parents[2]

#: An app as users write it. Its tasks write to a file, so that the test can see what they did.
APP = """
import asyncio, os, pathlib, time
from tampu import Queue, Worker

queue = Queue("q")
other = Queue("other")
both = [queue, other]
journal = pathlib.Path(__file__).with_name("journal")


def write(*words):
    with journal.open("a") as file:
        print(*words, file=file, flush=True)


@queue.task
async def sleep(secs: float) -> str:
    write("started", os.getpid())
    await asyncio.sleep(secs)
    write("done", os.getpid())
    return "slept"


@queue.task
async def wait_for(path: str) -> None:
    write("started", os.getpid())
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    write("done", os.getpid())


@queue.task
async def block(secs: float) -> None:
    write("started", os.getpid())
    time.sleep(secs)


@queue.task(attempts=1)
async def fail() -> None:
    raise ValueError("on purpose")


@other.task
def version() -> str:
    return "VERSION"


@other.task(process=True)
def pid() -> int:
    return os.getpid()


@other.task(process=True)
def process_wait_for(path: str) -> None:
    write("started", os.getpid())
    while not os.path.exists(path):
        time.sleep(0.01)
    write("done", os.getpid())


worker = Worker(queue, concurrency=3, read_block_ms=500)
"""


@pytest.fixture
def app(tmp_path: Path, url: str) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def add(name: str, *, queue: str = "q", **payload: object) -> str:
    return invoke("add", queue, name, json.dumps(payload)).out.strip()


def journal(folder: Path) -> list[list[str]]:
    return [line.split() for line in whole_lines(folder / "journal")]


def until_written(folder: Path, word: str, times: int = 1) -> list[str]:
    """Wait for lines in the journal that start with a word, and return their second words."""

    def found() -> list[str] | None:
        seconds = [words[1] for words in journal(folder) if words[0] == word]
        return seconds if len(seconds) >= times else None

    return eventually(found, f"{times} times {word!r} in the journal")


def results(url: str, queue: str, job_id: str) -> object:
    async def ask() -> object:
        async with Queue(queue, url=url) as asked:
            return await asked.wait_for_result(job_id, 20)

    return asyncio.run(ask())


# --- start and stop


def test_a_worker_runs_jobs_and_drains_on_sigterm(app: Path, url: str) -> None:
    with worker_program(app, "app:both") as worker:
        assert results(url, "other", add("version", queue="other")) == "VERSION"
        assert results(url, "other", add("pid", queue="other")) not in (worker.process.pid, *worker.children())
        add("wait_for", path=str(app / "go"))
        until_written(app, "started")
        worker.signal(signal.SIGTERM)
        worker.until_logged("stopping: waiting for running jobs to finish")
        assert worker.is_alive  # the job is still running
        (app / "go").touch()
        assert worker.wait() == 0
        assert [words[0] for words in journal(app)] == ["started", "done"]
        worker.until_logged("worker stopped")


def test_ctrl_c_drains_too(app: Path) -> None:
    with worker_program(app, "app:queue") as worker:
        add("wait_for", path=str(app / "go"))
        until_written(app, "started")
        os.killpg(worker.process.pid, signal.SIGINT)  # like a terminal: to all processes at once
        worker.until_logged("stopping: waiting for running jobs to finish")
        (app / "go").touch()
        assert worker.wait() == 0
        assert journal(app)[-1][0] == "done"


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_to_the_process_group_drains(app: Path, processes: int) -> None:
    with worker_program(app, "app:queue", "--processes", str(processes), "--concurrency", "1") as worker:
        for _ in range(processes):
            add("wait_for", path=str(app / "go"))
        until_written(app, "started", times=processes)
        worker.signal(signal.SIGTERM)  # like `timeout`: to the program, then to its group
        os.killpg(worker.process.pid, signal.SIGTERM)
        worker.until_logged("stopping: waiting for running jobs to finish", times=processes)
        (app / "go").touch()
        assert worker.wait() == 0
        assert [words[0] for words in journal(app)].count("done") == processes
        assert "abandon" not in worker.log.replace("send a second signal to abandon", "")


def test_sigterm_to_every_process_drains(app: Path) -> None:
    """By default systemd signals all processes of a unit, also those that left the process group."""
    with worker_program(app, "app:other") as worker:
        add("process_wait_for", queue="other", path=str(app / "go"))
        [handler] = until_written(app, "started")
        for pid in (int(handler), *worker.children(), worker.process.pid):
            os.kill(pid, signal.SIGTERM)
        worker.until_logged("stopping: waiting for running jobs to finish")
        (app / "go").touch()
        assert worker.wait() == 0
        assert journal(app) == [["started", handler], ["done", handler]]


def test_a_second_signal_without_running_jobs_is_not_an_error(app: Path) -> None:
    source = (app / "app.py").read_text()
    hook = "closing = Worker(queue, on_shutdown=lambda: wait_for.function('go'))"
    (app / "app.py").write_text(f"{source}\n{hook}\n")
    with worker_program(app, "app:closing") as worker:
        worker.until_logged("worker started")
        worker.signal(signal.SIGTERM)
        until_written(app, "started")
        time.sleep(SIGNAL_SECS)
        worker.signal(signal.SIGTERM)
        worker.until_logged("second signal:")
        (app / "go").touch()
        assert worker.wait() == 0
        assert "abandoned" not in worker.log


async def test_signals_within_a_second_count_as_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = None  # there are no processes
    monkeypatch.setattr(supervisor, "SIGNAL_SECS", 600)
    stopped = supervisor.Supervisor(plan, 0)
    stopped.stop()
    stopped.stop()
    assert "second signal:" not in caplog.text
    monkeypatch.setattr(supervisor, "SIGNAL_SECS", 0)
    stopped.stop()
    assert "second signal:" in caplog.text
    for task in stopped._killers:
        task.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_during_its_exit_do_not_change_the_exit_code(app: Path, number: signal.Signals) -> None:
    with worker_program(app, "app:queue") as worker:
        worker.until_logged("worker started")
        worker.signal(number)
        worker.until_logged("worker stopped")
        while worker.is_alive:
            worker.signal(number)
            time.sleep(0.005)  # a flood can stop Python itself
        assert worker.wait() == 0


def test_the_apps_folder_comes_before_installed_packages(app: Path, url: str) -> None:
    (app / "typer.py").write_text("VERSION = 'mine'")
    (app / "app.py").write_text((app / "app.py").read_text().replace('"VERSION"', '__import__("typer").VERSION'))
    with worker_program(app, "app:other"):
        assert results(url, "other", add("version", queue="other")) == "mine"


def test_a_second_signal_abandons_running_jobs(app: Path) -> None:
    with worker_program(app, "app:queue") as worker:
        add("sleep", secs=60)
        until_written(app, "started")
        worker.signal(signal.SIGTERM)
        worker.until_logged("stopping: waiting for running jobs to finish")
        children = worker.children()
        time.sleep(SIGNAL_SECS)  # a signal that follows sooner counts as the same one
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1
        worker.until_logged("abandoned the running jobs; other workers will retry them after 30 s")
        assert re.search(r"abandoned sleep \w{26} on attempt 1", worker.log)
        assert not any(is_alive(pid) for pid in children)


def test_everything_ends_before_the_documented_time_of_the_process_manager() -> None:
    """The supervisor kills its processes before systemd, Compose or Kubernetes kill the supervisor."""
    pages = [PROJECT / "docs" / "how-to" / "deploy-and-shutdown.md"]
    pages += [
        path
        for path in (PROJECT / "src" / "tampu" / "cli" / "commands" / "new" / "templates").rglob("*")
        if path.suffix in (".yaml", ".service")
    ]
    pattern = r"(?:TimeoutStopSec=|terminationGracePeriodSeconds: |stop_grace_period: )(\d+)"
    found = [int(secs) for page in pages for secs in re.findall(pattern, page.read_text())]
    assert len(found) >= 6
    assert min(found) > ConsumerConfig().shutdown_deadline_secs + DRAIN_GRACE_SECS


def test_jobs_that_exceed_the_shutdown_deadline_are_an_error(app: Path) -> None:
    with worker_program(app, "app:queue", "--shutdown-deadline", "0s") as worker:
        add("sleep", secs=60)
        until_written(app, "started")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1
        worker.until_logged("did not end in time")
        worker.until_logged("was abandoned at shutdown on attempt 1; another worker will run it again")
        assert "failed" not in worker.log


def test_the_jobs_of_a_process_that_had_to_be_killed_are_logged_as_abandoned(app: Path) -> None:
    with worker_program(app, "app:queue") as worker:
        add("block", secs=60)
        until_written(app, "started")
        for said in (
            "send a second signal",
            "second signal: abandoning",
            "worker-1 has not stopped in time: killing it",
        ):
            worker.signal(signal.SIGTERM)
            worker.until_logged(said)
            time.sleep(SIGNAL_SECS)
        assert worker.wait() == 1
        assert "its running jobs are abandoned, and another worker will run them again" in worker.log


def test_a_killed_child_is_restarted(app: Path) -> None:
    with worker_program(app, "app:queue", "--processes", "2") as worker:
        worker.until_logged("worker started: queues q", times=2)
        first, second = worker.children()
        os.kill(first, signal.SIGKILL)
        worker.until_logged("worker-1 was killed by SIGKILL; restarting in ")
        eventually(lambda: len(worker.children()) == 2 and first not in worker.children(), "another has started")
        assert second in worker.children()
        worker.until_logged("worker started: queues q", times=3)
        add("sleep", secs=0)
        until_written(app, "done")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0


def test_processes_of_a_worker_with_a_fixed_id_get_their_own_ids(app: Path, url: str) -> None:
    source = (app / "app.py").read_text()
    (app / "app.py").write_text(source + '\nnamed = Worker(queue, consumer_id="w")\n')
    with worker_program(app, "app:named", "--processes", "2") as worker, redis.Redis.from_url(url) as client:
        worker.until_logged("worker started: queues q", times=2)

        def prefixes() -> list[bytes]:
            return [one["name"][:2] for one in client.xinfo_consumers("{chasqui:q}:stream", "default")]

        eventually(lambda: prefixes() == [b"w:", b"w:"], "each has its own ID")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert client.xinfo_consumers("{chasqui:q}:stream", "default") == []


def test_children_drain_when_their_supervisor_is_killed(app: Path) -> None:
    with worker_program(app, "app:queue") as worker:
        add("wait_for", path=str(app / "go"))
        [pid] = until_written(app, "started")
        worker.process.kill()
        worker.process.wait()
        eventually(lambda: "the supervisor has died" in worker.log, "the child has noticed")
        assert is_alive(int(pid))
        (app / "go").touch()
        eventually(lambda: not is_alive(int(pid)), "the child has ended")
        assert journal(app)[-1][0] == "done"


def test_a_worker_waits_for_its_server_and_logs_it(app: Path, fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    server.stop()
    with worker_program(app, "app:queue", "--url", server.url) as worker:
        worker.until_logged("queue q: server not reachable, waiting for it")
        server.start()
        worker.until_logged("queue q: connected after")
        invoke("add", "q", "sleep", '{"secs": 0}', "--url", server.url)
        until_written(app, "done")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_wrong_password_ends_a_worker_at_once(app: Path, fresh_server: Callable[..., Server]) -> None:
    server = fresh_server(requirepass="right")
    done = run_program("worker", "app:queue", "--url", f"redis://:wr0ng@127.0.0.1:{server.port}", cwd=app)
    assert done.code == 1
    assert "WRONGPASS" in done.err
    assert "wr0ng" not in done.err


def test_options_reach_the_worker(app: Path) -> None:
    options = ("--concurrency", "7", "--no-promoter", "--no-scheduler", "--group", "g", "--claim-after", "9s")
    with worker_program(
        app, "app:queue", *options, "--no-results", "--batch", "3", TAMPU_WORKER_PROCESSES="2"
    ) as worker:
        worker.until_logged("worker started: queues q; concurrency 7", times=2)
        eventually(lambda: invoke("inspect", "q", "--json").json["groups"][0]["name"] == "g", "the group is made")
        assert invoke("inspect", "q", "--json").json["promoter"] is None
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0


def test_json_logs_are_one_object_per_line(app: Path) -> None:
    with worker_program(app, "app:queue", "--log", "json", "--log-jobs", "all") as worker:
        job_id = add("fail")
        add("sleep", secs=0)
        worker.until_logged("sleep")
        worker.until_logged("on purpose")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        records = [json.loads(line) for line in worker.log.splitlines()]
    failed = [record for record in records if record.get("job_id") == job_id]
    assert {record["level"] for record in failed} == {"warning"}  # a retry may fail before the signal
    assert failed[0]["role"] == "worker-1"
    assert all({"ts", "level", "message", "pid"} <= set(record) for record in records)


LOGGING_APP = """
import asyncio, logging, os, threading, warnings
from tampu import Queue

queue = Queue("q")
log = logging.getLogger("shop")


def write():
    log.debug("not shown")
    log.info("paid %s", "it", extra={"order": 7, "who": threading.Lock})
    try:
        raise ValueError("on purpose")
    except ValueError:
        log.exception("caught")


@queue.task
async def on_loop() -> None:
    await asyncio.sleep(0)
    write()


@queue.task
def in_thread() -> None:
    write()


@queue.task(process=True)
def in_process() -> None:
    write()
    warnings.warn("take care")
    if (fork := os.fork()) == 0:
        log.error("in a fork of the process")
        os._exit(0)
    os.waitpid(fork, 0)
"""
#: Where a task runs.
PLACES = ("on_loop", "in_thread", "in_process")


def test_json_lines_of_tasks_carry_the_job_and_their_extra_fields(tmp_path: Path, url: str) -> None:
    (tmp_path / "app.py").write_text(LOGGING_APP)
    with worker_program(tmp_path, "app:queue", "--log", "json") as worker:
        ids = {name: add(name) for name in PLACES}
        for job_id in ids.values():
            results(url, "q", job_id)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        bare = "in a fork of the process"  # it has no way to its worker
        assert worker.log.count(bare) == 1
        lines = [json.loads(line) for line in worker.log.replace(f"{bare}\n", "").splitlines()]
    about_job = {name: {"queue": "q", "task": name, "job_id": ids[name], "attempt": 1} for name in PLACES}
    for name in PLACES:
        paid, caught = (line for line in lines if line.get("job_id") == ids[name] and line["logger"] == "shop")
        expected = {"message": "paid it", "level": "info", "order": 7, "role": "worker-1", **about_job[name]}
        assert paid.items() >= expected.items()
        assert "lock" in str(paid["who"])
        assert caught["message"] == "caught"
        assert "ValueError: on purpose" in caught["traceback"]
    (warning,) = (line for line in lines if "take care" in line["message"])
    assert warning.items() >= about_job["in_process"].items()
    assert {line["message"] for line in lines}.isdisjoint({"not shown"})


def test_text_lines_of_tasks_name_the_job(tmp_path: Path, url: str) -> None:
    (tmp_path / "app.py").write_text(LOGGING_APP)
    with worker_program(tmp_path, "app:queue") as worker:
        for name in PLACES:
            job_id = add(name)
            results(url, "q", job_id)
            said = rf"info    worker-1\[\d+\] paid it queue=q task={name} job_id={job_id} attempt=1 order=7 who=<"
            assert re.search(said, worker.log)
        assert worker.log.count("ValueError: on purpose") == len(PLACES)


def test_a_changed_file_restarts_the_worker(app: Path, url: str) -> None:
    with worker_program(app, "app:other", "--reload") as worker:
        assert results(url, "other", add("version", queue="other")) == "VERSION"
        (app / "app.py").write_text("syntax error")
        worker.until_logged("app.py changed: restarting")
        worker.until_logged("waiting for a file to change")
        (app / "app.py").write_text(APP.replace("VERSION", "2"))
        worker.until_logged("worker started: queues other", times=2)
        assert results(url, "other", add("version", queue="other")) == "2"
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0


def test_hidden_and_foreign_folders_are_not_watched(tmp_path: Path) -> None:
    for name in ("app.py", "package/module.py", ".venv/x.py", "node_modules/x.py", "__pycache__/x.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    watched = {os.path.relpath(path, tmp_path) for path, _ in python_files(tmp_path)}
    assert watched == {"app.py", "package/module.py"}


# --- promoter and scheduler on their own


def test_a_promoter_and_a_scheduler_can_run_alone(url: str) -> None:
    async def schedule() -> None:
        async with Queue("a", url=url) as queue, Queue("b", url=url) as other:
            await queue.add("later", {}, delay_ms=50)
            task = other.task(_nothing)
            await task.every(0.05, limit=2)

    asyncio.run(schedule())
    with start("promoter", "a", "b", "--log", "json") as promoter, start("scheduler", "b") as scheduler:
        eventually(lambda: invoke("inspect", "a", "--json").json["waiting"] == 1, "the promoter has promoted")
        eventually(lambda: invoke("inspect", "b", "--json").json["waiting"] == 2, "the scheduler has fired")
        for process in (promoter, scheduler):
            ends = time.monotonic() + SIGNAL_SECS / 2
            while process.poll() is None and time.monotonic() < ends:
                process.send_signal(signal.SIGTERM)  # like `timeout`: they count as one
                time.sleep(0.005)  # a flood can stop Python itself
            _, err = process.communicate(timeout=20)
            assert process.returncode == 0, err
    told = invoke("inspect", "a", "--json").json
    assert told["promoter"] is None  # the lock was released


async def _nothing() -> None:
    pass


def test_a_promoter_without_a_server_ends_with_one_line() -> None:
    done = run_program("promoter", "q", "--url", "redis://127.0.0.1:9", "--timeout", "0.2")
    assert done.code == 1
    assert "cannot connect to 127.0.0.1:9" in done.err.splitlines()[-1]


# --- invalid targets


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("empty", 2, "'empty' names only a module; add an attribute: empty:NAME; the module has empty:bare"),
        ("app:", 2, "names only a module"),
        (":queue", 2, "is not of the form module:attribute, such as app:queue"),
        ("", 2, "is not of the form module:attribute"),
        ("a b:queue", 2, "is not of the form module:attribute"),
        ("app.py:queue", 2, "is a path; use the module name: app:queue"),
        ("./sub/app.py:queue", 2, "use the module name: sub.app:queue"),
        ("nosuch:queue", 2, "no module 'nosuch' in"),
        ("app.sub:queue", 2, "no module 'app.sub'"),
        ("queue:queue", 2, "'queue' is the name of a standard-library module; rename your file"),
        ("app:quue", 2, "module 'app' has no 'quue' (did you mean 'queue'?)"),
        ("app:queue.nothing", 2, "has no 'queue.nothing'"),
        ("app:APP", 2, "has no 'APP'"),
        ("app:write", 2, "app:write is a function; expected a Queue, a list of Queues or a Worker"),
        ("app:Queue", 2, "is the class Queue"),
        ("empty:nothing", 2, "is an empty list"),
        ("empty:mixed", 2, "is a list with other values"),
        ("empty:bare", 2, "queue 'bare' has no tasks to run"),
        ("broken:queue", 1, "importing broken failed: ModuleNotFoundError: No module named 'not_there' ("),
        ("syntax:queue", 1, "importing syntax failed: SyntaxError: "),
        ("raising:queue", 1, "importing raising failed: ZeroDivisionError: division by zero ("),
        ("exiting:queue", 1, "importing exiting failed: SystemExit: 7"),
    ],
)
def test_a_wrong_target_is_explained_in_one_line(
    app: Path, monkeypatch: pytest.MonkeyPatch, target: str, code: int, said: str
) -> None:
    modules = {
        "empty": "from tampu import Queue\nnothing = []\nmixed = [1]\nbare = Queue('bare')\n",
        "broken": "import not_there\n",
        "syntax": "def (:\n",
        "raising": "def fail():\n    1 / 0\nfail()\n",
        "exiting": "raise SystemExit(7)\n",
    }
    for name, text in modules.items():
        (app / f"{name}.py").write_text(text)
    _forget(monkeypatch, app, *modules, "app")
    with pytest.raises(Exception) as caught:
        build_worker(WorkerPlan(targets=[target]))
    assert said in line_of(caught.value)
    assert "\n" not in line_of(caught.value)
    assert exit_code_of(caught.value) == code


def test_a_module_stands_for_all_its_queues(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from tampu import Queue\nfirst, second, bare = Queue('first'), Queue('second'), Queue('bare')\nagain = first\n"
    )
    tasks = "@first.task\ndef one(): ...\n@second.task\ndef two(): ...\n"
    (app / "shop.py").write_text(text + tasks)
    _forget(monkeypatch, app, "shop")
    assert build_worker(WorkerPlan(targets=["shop"])).name == "first,second"


@pytest.mark.parametrize("option", ["--weights", "--reserve", "--limit"])
@pytest.mark.parametrize("given", ["emails", "emails=", "=3", "emails=x", "emails=-1", "emails=1,"])
def test_a_share_that_is_no_number_is_refused(option: str, given: str) -> None:
    done = invoke("worker", "app:queue", option, given)
    assert done.code == 2
    assert f"{option} takes queue names and numbers such as critical=6,bulk=1" in done.err


def test_shares_reach_the_worker(app: Path) -> None:
    done = run_program("worker", "app", "--weights", "nosuch=2", cwd=app)
    assert done.code == 2
    assert "weights names 'nosuch', but the worker serves no such queue" in done.err


def _forget(monkeypatch: pytest.MonkeyPatch, folder: Path, *modules: str) -> None:
    """Make these modules importable from this folder, as if never imported; undone after the test."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(("target", "code"), [("app:nothing", 2), ("raising:queue", 1)])
def test_a_wrong_target_ends_the_program_with_one_line(app: Path, target: str, code: int) -> None:
    (app / "raising.py").write_text("1 / 0\n")
    done = run_program("worker", target, "--processes", "3", cwd=app)
    assert done.code == code
    assert len(done.err.splitlines()) == 1
    assert "Traceback" not in done.err


def test_a_worker_object_keeps_its_settings(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch, app, "app")
    assert build_worker(WorkerPlan(targets=["app:worker"])).config.concurrency == 3
    with pytest.raises(UsageError, match="leave out --concurrency"):
        build_worker(WorkerPlan(targets=["app:worker"], settings={"concurrency": 5}))
    with pytest.raises(UsageError, match="app:worker is a Worker, which cannot be combined with other targets"):
        build_worker(WorkerPlan(targets=["app:queue", "app:worker"]))


def test_a_worker_object_without_metrics_gets_those_of_the_endpoint(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch, app, "app")
    plan = WorkerPlan(targets=["app:worker"], metrics=True)
    worker = build_worker(plan)
    sink = worker.config.metrics
    assert isinstance(sink, PrometheusSink)
    assert build_worker(plan).config.metrics is sink  # it keeps the one that it has
    worker.config = replace(worker.config, metrics=noop_sink())
    assert build_worker(WorkerPlan(targets=["app:worker"])).config.metrics is noop_sink()


def test_several_targets_are_served_together_each_queue_once(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch, app, "app")
    assert build_worker(WorkerPlan(targets=["app:queue", "app:both"])).name == "q,other"
