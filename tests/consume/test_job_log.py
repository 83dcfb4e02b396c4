"""Log lines about jobs: each failure says what follows, the first of its kind has the traceback, storms are bounded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from consume.workers import consuming
from support.waiting import until
from tampu.consume import job_log
from tampu.consume.inflight import Delivery
from tampu.consume.job_log import BURST, LINES_PER_SEC, JobLog
from tampu.consume.outcomes import Retried
from tampu.wire.job import Job

if TYPE_CHECKING:
    import pytest

    from consume.views import WorkerView


def fail_in_process(job: Job[Any]) -> None:
    raise ValueError("failed in a process")


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tampu.job"]


async def test_every_failure_says_what_follows(view: WorkerView, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tampu.job")

    async def handler(job: Job[Any]) -> None:
        if job.payload == "dies" or job.attempt == 0:
            raise ValueError(f"no {job.payload}")

    async with consuming(view.server.url, handler, max_attempts=2):
        view.add("dies", name="mail", job_id="job-d")
        await until(view.is_settled, "it is dead")
        view.add("recovers", name="mail", job_id="job-r")
        await until(view.is_settled, "it is done")
    lines = lines_of(caplog)
    assert "q: mail job-d failed: attempt 1 of 2, after " in lines[0]
    assert ": ValueError: no dies; retrying in 0.001 s" in lines[0]
    assert "q: mail job-d failed: attempt 2 of 2, after " in lines[1]
    assert lines[1].endswith(": ValueError: no dies; moved to dead letters (retries_exhausted) (seen 2 times)")
    assert lines[-1].startswith("q: mail job-r succeeded on attempt 2 in ")
    levels = [record.levelno for record in caplog.records if record.name == "tampu.job"]
    assert levels == [logging.WARNING, logging.ERROR, logging.WARNING, logging.INFO]


async def test_the_first_failure_of_a_kind_has_a_traceback(view: WorkerView, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(job: Job[Any]) -> None:
        if job.payload == "other":
            raise KeyError("other")
        raise ValueError("not worth it")

    async with consuming(view.server.url, handler, max_attempts=1):
        for payload in ("one", "one", "other"):
            view.add(payload)
            await until(view.is_settled, "it is dead")
    records = [record for record in caplog.records if record.name == "tampu.job"]
    assert [record.exc_info is not None for record in records] == [True, False, True]
    assert "in handler" in caplog.text
    assert "consume/execute.py" not in caplog.text, "frames of the worker are left out"


async def test_an_error_in_another_process_keeps_its_name_and_traceback(
    view: WorkerView, caplog: pytest.LogCaptureFixture
) -> None:
    async with consuming(view.server.url, fail_in_process, process=True, max_attempts=1):
        view.add("x")
        await until(view.is_settled, "it is dead", 30)
    assert "ValueError: failed in a process" in caplog.text
    assert "in fail_in_process" in caplog.text
    assert "RemoteError" not in caplog.text


def failed(log: JobLog, error: BaseException) -> None:
    delivery = Delivery(b"1-0", Job("job-1", "mail"), 0)
    log.failed(Retried(delivery, 0, 10, "", 5), error, 3)


def test_a_storm_is_logged_at_a_bounded_rate_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = JobLog("q", now=lambda: now)
    error = ValueError("again")
    for _ in range(1000):
        failed(log, error)
    assert len(lines_of(caplog)) == BURST + 1
    now += 1.0
    log.flush()
    assert lines_of(caplog)[-1] == f"q: mail failed {1000 - BURST - 1:,} more times with ValueError at an unknown place"
    failed(log, error)
    assert lines_of(caplog)[-1].endswith("retrying in 0.005 s (seen 1,001 times)")
    for _ in range(1000):
        failed(log, error)
    assert len(lines_of(caplog)) == BURST + 1 + LINES_PER_SEC


def test_a_storm_of_recoveries_is_bounded_and_hides_no_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tampu.job")
    now = 0.0
    log = JobLog("q", now=lambda: now)
    job: Job[Any] = Job("job-1", "mail", attempt=1)
    for _ in range(1000):
        log.recovered(job, 5_000)
    assert len(lines_of(caplog)) == BURST
    for _ in range(2):
        failed(log, ValueError("again"))
    assert len(lines_of(caplog)) == BURST + 2
    now += 1.0
    log.recovered(job, 5_000)
    assert lines_of(caplog)[-1].endswith(f" ({1000 - BURST} other recoveries not logged)")
    log.recovered(job, 5_000)
    assert "not logged" not in lines_of(caplog)[-1]


def test_failures_left_out_are_counted_before_their_kind_is_forgotten(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "MAX_KINDS", 1)
    now = 0.0
    log = JobLog("q", now=lambda: now)
    for _ in range(BURST + 5):
        failed(log, ValueError("no"))
    now += 1.0
    log.failed(Retried(Delivery(b"1-0", Job("job-1", "other"), 0), 0, 10, "", 5), ValueError("no"), 3)
    lines = lines_of(caplog)
    assert lines[-2] == "q: mail failed 4 more times with ValueError at an unknown place"
    assert "q: other job-1 failed" in lines[-1]


def test_a_log_line_never_has_a_payload(caplog: pytest.LogCaptureFixture) -> None:
    log = JobLog("q")
    log.failed(Retried(Delivery(b"1-0", Job("job-1", "mail", {"password": "hunter2"}), 0), 0, 10, "", 5), None, 3)
    assert "job-1" in caplog.text
    assert "hunter2" not in caplog.text


def test_every_line_can_be_written_as_utf_8(caplog: pytest.LogCaptureFixture) -> None:
    class SurrogateError(Exception):
        pass

    try:
        raise SurrogateError("lone \ud800 surrogate")
    except SurrogateError as error:
        failed(JobLog("q"), error)
    assert "SurrogateError: lone ? surrogate" in caplog.text
    assert "test_job_log.py" in caplog.text
    caplog.text.encode()
