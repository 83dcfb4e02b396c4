"""The backend for Django's task framework: `django.tasks` of Django 6, or the package django-tasks before it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from django.utils.module_loading import import_string

from api.workers import QUICK
from contrib.conftest import tasks_package
from support.waiting import until
from tampu import Job, JobState
from tampu.sync import SyncQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from servers.process import Server


@pytest.fixture
def jobs(server: Server, django_databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module with the tasks; its queues are on the test's server."""
    monkeypatch.setenv("TAMPU_URL", server.url)
    from contrib import django_jobs
    from tampu.contrib.django import tasks

    yield django_jobs
    for queue in tasks._queues.values():
        queue.sync.close()
    tasks._queues.clear()


@pytest.fixture
def signals(jobs: ModuleType) -> Iterator[list[tuple[str, str, str]]]:
    """The signals sent: name, task, status."""
    sent: list[tuple[str, str, str]] = []
    receivers = []
    for name in ("task_enqueued", "task_started", "task_finished"):
        signal = import_string(f"{tasks_package()}.signals.{name}")

        def receive(sender: object, task_result: Any, name: str = name, **_: object) -> None:
            sent.append((name, task_result.task.name, str(task_result.status)))

        signal.connect(receive)
        receivers.append((signal, receive))
    yield sent
    for signal, receive in receivers:
        signal.disconnect(receive)


def run_worker(*results: Any, **settings: Any) -> None:
    """Run a worker until these have finished."""
    from tampu.contrib.django.tasks import tasks_worker

    async def run() -> None:
        worker = tasks_worker(**(QUICK | settings))
        running = asyncio.create_task(worker.run())
        try:
            for result in results:
                await until(partial(finished, result), f"{result.task.name} has finished")
        finally:
            await worker.close()
            await running

    async def finished(result: Any) -> bool:
        await result.arefresh()
        return bool(result.is_finished)

    asyncio.run(run())


def test_a_task_runs_and_its_result_is_found_by_id(jobs: ModuleType, signals: list[tuple[str, str, str]]) -> None:
    result = jobs.add.enqueue(2, second=3)
    assert (result.status, result.args, result.kwargs) == ("READY", [2], {"second": 3})
    run_worker(result)
    assert (result.return_value, result.attempts, result.errors) == (5, 1, [])
    assert result.enqueued_at <= result.started_at <= result.finished_at
    again = jobs.add.get_result(result.id)
    assert (again.return_value, again.args, again.kwargs, again.backend) == (5, [2], {"second": 3}, "default")
    assert again.task.queue_name == "default"
    assert signals == [
        ("task_enqueued", "add", "READY"),
        ("task_started", "add", "RUNNING"),
        ("task_finished", "add", "SUCCESSFUL"),
    ]


def test_queues_coroutines_and_the_orm(jobs: ModuleType) -> None:
    report, loud = jobs.count_users.enqueue(), jobs.shout.enqueue("hi")
    run_worker(report, loud)
    assert (report.return_value, loud.return_value) == (0, "HI")
    assert report.task.queue_name == "reports"


def test_a_task_can_be_enqueued_from_a_coroutine(jobs: ModuleType) -> None:
    result = asyncio.run(jobs.add.aenqueue(1))
    run_worker(result)
    assert result.return_value == 1


def test_a_task_with_run_after_waits(jobs: ModuleType) -> None:
    later = jobs.add.using(run_after=datetime.now(UTC) + timedelta(hours=1)).enqueue(1)
    found = jobs.add.get_result(later.id)
    assert (found.status, found.args, found.attempts) == ("READY", [1], 0)
    now = jobs.add.using(run_after=datetime.now(UTC) - timedelta(hours=1)).enqueue(1)
    run_worker(now)
    assert now.return_value == 1


def test_a_waiting_task_is_ready_and_has_no_return_value(jobs: ModuleType) -> None:
    found = jobs.add.get_result(jobs.add.enqueue(1).id)
    assert (found.status, found.args, found.is_finished, found.attempts) == ("READY", [1], False, 0)
    with pytest.raises(ValueError, match="not finished"):
        found.return_value  # noqa: B018


def test_a_failing_task_is_retried_and_the_context_counts(
    jobs: ModuleType, signals: list[tuple[str, str, str]]
) -> None:
    result = jobs.attempt.enqueue(until=2)
    run_worker(result)
    assert result.return_value == {"attempt": 2, "id": result.id}
    assert result.attempts == 2
    assert [name for name, _, _ in signals] == ["task_enqueued", "task_started", "task_started", "task_finished"]


@pytest.mark.parametrize(
    ("how", "attempts", "path"),
    [("a reason", 2, "builtins.LookupError"), ("unrecoverable", 1, "tampu.consume.handlers.UnrecoverableError")],
)
def test_a_task_that_keeps_failing_has_failed(
    jobs: ModuleType, signals: list[tuple[str, str, str]], how: str, attempts: int, path: str
) -> None:
    result = jobs.broken.enqueue(how)
    run_worker(result)
    assert (result.status, result.attempts) == ("FAILED", attempts)
    [error] = result.errors
    assert error.exception_class_path == path
    assert error.exception_class.__name__ == path.rpartition(".")[2]
    assert error.traceback.startswith("Traceback")
    assert "in broken" in error.traceback
    assert result.finished_at is not None
    with pytest.raises(ValueError, match="failed"):
        result.return_value  # noqa: B018
    assert signals[-1] == ("task_finished", "broken", "FAILED")
    assert [name for name, _, _ in signals].count("task_finished") == 1


def test_a_running_task_says_so(jobs: ModuleType) -> None:
    from tampu.contrib.django.tasks import TampuBackend

    result = jobs.add.enqueue(1)
    backend = jobs.add.get_backend()
    queue = backend.queue("default")
    assert isinstance(backend, TampuBackend)

    async def take() -> None:
        client = queue.sync._inner.producer.ready_client()
        await client.call("XGROUP", "CREATE", queue.keys.stream, "default", "0")
        await client.call("XREADGROUP", "GROUP", "default", "a worker", "STREAMS", queue.keys.stream, ">")

    queue.sync._run(take())
    result.refresh()
    assert (result.status, result.worker_ids) == ("RUNNING", ["a worker"])


def test_an_unknown_id_does_not_exist(jobs: ModuleType) -> None:
    missing = import_string(f"{tasks_package()}.exceptions.TaskResultDoesNotExist")
    with pytest.raises(missing):
        jobs.add.get_result("01ARZ3NDEKTSV4RRFFQ69G5FAV")


def test_the_result_of_another_task_is_a_mismatch(jobs: ModuleType) -> None:
    mismatch = import_string(f"{tasks_package()}.exceptions.TaskResultMismatch")
    with pytest.raises(mismatch):
        jobs.shout.get_result(jobs.add.enqueue(1).id)


def test_a_job_can_only_call_tasks(jobs: ModuleType) -> None:
    from tampu.consume.handlers import PutBack

    backend = jobs.add.get_backend()
    for name in ("contrib.django_jobs.no_task", "os.getpid", "no.such.module", "nodots"):
        outcome = backend.run(Job("1", name, {"args": [], "kwargs": {}}))
        assert isinstance(outcome, PutBack), name  # for a worker that knows it, as during a deploy


def test_priorities_are_refused(jobs: ModuleType) -> None:
    with pytest.raises(Exception, match="priority"):
        jobs.add.using(priority=1)


def test_unknown_options_are_refused_when_a_task_is_enqueued(jobs: ModuleType) -> None:
    from tampu.contrib.django.tasks import TampuBackend

    backend = TampuBackend("default", {"OPTIONS": {"atempts": 3}})
    with pytest.raises(TypeError, match="unexpected setting 'atempts'"):
        backend.enqueue(jobs.add, [1], {})


def test_a_worker_is_for_a_backend_of_tampu(jobs: ModuleType) -> None:
    from tampu.contrib.django.tasks import tasks_worker

    with pytest.raises(TypeError, match=r"TASKS\['elsewhere'\] is DummyBackend, not TampuBackend"):
        tasks_worker("elsewhere")
    assert [queue.name for queue in tasks_worker().queues] == ["default", "reports"]
    with pytest.raises(TypeError, match="atempts"):
        tasks_worker(atempts=3)


def test_a_task_that_moves_while_it_is_looked_for_is_found(jobs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    result = jobs.add.enqueue(1)
    look = SyncQueue.get_job
    answers = iter([JobState(id=result.id, state="unknown")] * 2)  # one for each queue
    monkeypatch.setattr(SyncQueue, "get_job", lambda queue, job_id: next(answers, None) or look(queue, job_id))
    assert jobs.add.get_result(result.id).status == "READY"


def test_a_run_leaves_no_outdated_connection_behind(jobs: ModuleType) -> None:
    from django.db import connection

    job = Job("1", "contrib.django_jobs.count_users", {"args": [], "kwargs": {}})
    assert jobs.add.get_backend().run(job)["return_value"] == 0
    assert connection.connection is None  # CONN_MAX_AGE is 0
