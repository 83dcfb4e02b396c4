"""The examples run and print what they promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servers.process import Server

EXAMPLES = Path(__file__).parents[2] / "examples"

#: The complete output of each, as a pattern.
#: Examples in which jobs fail on purpose.
FAILING = {"retries.py", "events_follower.py", "error_reporter.py", "database_session.py"}
EXPECTED_LOG = re.compile(r"\w+: \w+ \S+ failed: attempt \d of \d, after .*|Traceback .*| {2,}.*|[\w.]+Error: .*")
OUTPUT = {
    "first_job.py": r"added job \w{26}\nsending 'hi' to ada@example.com\nresult: sent to ada@example.com\n",
    "typed_payloads.py": r"Receipt: 11.20, for the same invoice: True\nrefused: task 'charge': .*nothing was sent\n",
    "retries.py": r"(attempt \d of pay\(100\)\n){3}"
    r"failed: retries_exhausted - ConnectionError: the bank is closed\n"
    r"failed: unrecoverable - UnrecoverableError: the amount must be positive\n"
    # The worker may run the job before `replay_dlq` returns.
    r"(replayed: 1\nattempt 1 of pay\(100\)|attempt 1 of pay\(100\)\nreplayed: 1)\nresult: paid 100\n"
    r"left in the dead-letter queue: \['the amount must be positive'\]\n",
    "cron.py": r"every second: .*, next at .* UTC\n"
    r"report::cron:0 9 \* \* MON-FRI:America/Lima: .*, next at .*:00:00 UTC\n"
    r"report for everywhere\nleft: \[\]\n",
    "events_follower.py": r"(.*\n)*progress convert .*'note': 'step 1 of 3'.*\n(.*\n)*"
    r"failed convert {'reason': 'OSError: the disk is full'}\nretry-scheduled convert {'backoff_ms': \d+}\n"
    r"(.*\n)*completed convert \n",
    "sync_view.py": r"200 OK: sent to ada@example.com\n400 Bad Request: task 'welcome': .*nothing was sent\n",
    "fastapi_app.py": r"202 added\n{'state': 'done', 'result': {'shipped': 'tea', 'count': 3}}\n"
    r"404 for an unknown order\n",
    "dashboard_fastapi.py": r"403 without a session\n200 {'waiting': 1, 'running': 0, .*}\n200 True\n",
    "dashboard_starlette.py": r"403 without a session\n200 {'waiting': 1, 'running': 0, .*}\n200 True\n",
    "dashboard_django.py": r"the shop\n403 without a session\n",
    "after_commit_sqlalchemy.py": r"rolled back: no job was added\nsending a welcome to ada@example.com\n",
    "after_commit_django.py": r"rolled back: no job was added\nsending a welcome to ada@example.com\n",
    "error_reporter.py": r"paid 5\nbreadcrumb: attempt 1 of pay: the bank is closed\nagain in 0.1 s\n"
    r"breadcrumb: attempt 2 of pay: the bank is closed\n"
    r"report: ConnectionError: the bank is closed "
    r"{'queue': 'payments', 'task': 'pay', 'reason': 'retries_exhausted'}\nfailed: retries_exhausted\n",
    "tenant_context.py": r"invoice 7 of acme\ninvoice 7 of zeta, in a thread\ninvoice 7 of acme, in a process\n",
    "database_session.py": r"users: 1\nrolled back: ValueError: not this one\nusers: 2\n",
    "outbox.py": r"a process died after its commit \(exit code 1\): rows in the outbox: 1, their jobs: \['unknown'\]\n"
    r"a relay died after its add: rows in the outbox: 1, their jobs: \['waiting'\]\nrelayed: 1\n"
    r"done: rows in the outbox: 0, their jobs: \[\]\nsending a welcome to ada@example.com\njobs run: 1\n",
}


def environment(server: Server) -> dict[str, str]:
    """Return an environment with the test server's URL and warnings as errors."""
    return os.environ | {"TAMPU_URL": server.url, "PYTHONWARNINGS": "error"}


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_prints_what_it_promises(server: Server, name: str) -> None:
    strict = environment(server)
    if "fastapi" in name:
        strict.pop("PYTHONWARNINGS")  # FastAPI and its dependencies may warn
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, env=strict, timeout=60)
    assert re.fullmatch(OUTPUT[name], done.stdout), done.stdout + done.stderr
    assert done.returncode == 0
    # Failed attempts are logged on stderr, the first of each kind with its traceback; nothing else may be.
    unexpected = [line for line in done.stderr.splitlines() if not EXPECTED_LOG.match(line)]
    assert unexpected == []
    assert bool(done.stderr) == (name in FAILING)


def test_a_stopped_worker_finishes_its_running_jobs(server: Server) -> None:
    program = [sys.executable, EXAMPLES / "graceful_shutdown.py"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment(server)) as process:
        assert process.stdout is not None
        before = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        after = process.stdout.read()
        assert process.wait(30) == 0
    assert before == ["database opened; press Ctrl-C to stop\n", "download 0 started\n", "download 1 started\n"]
    assert sorted(after.splitlines()[:4]) == [
        "download 0 finished",
        "download 1 finished",
        "download succeeded",
        "download succeeded",
    ]
    assert after.splitlines()[4:] == ["database closed", "left for another worker: 2"]


def test_the_first_job_needs_no_server() -> None:
    without = {name: value for name, value in os.environ.items() if name != "TAMPU_URL"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "first_job.py"], capture_output=True, text=True, env=without, timeout=60
    )
    assert re.fullmatch(OUTPUT["first_job.py"], done.stdout), done.stdout + done.stderr


def test_the_list_of_examples_is_complete() -> None:
    there = {path.name for path in EXAMPLES.glob("*.py")}
    listed = set(re.findall(r"^\| `(\w+\.py)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert there == listed == OUTPUT.keys() | {"graceful_shutdown.py"}
