"""Failures of the lease thread: recovery, health and logs."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import consuming
from support.waiting import until
from tampu.redis import calls
from tampu.redis.faults import Unreachable

if TYPE_CHECKING:
    from consume.views import WorkerView
    from tampu.wire.job import Job


def _is_lease_thread() -> bool:
    return threading.current_thread().name == "tampu-leases"


@pytest.mark.slow
async def test_a_lease_thread_without_file_descriptors_restarts(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_out_of_descriptors = True
    new_event_loop = asyncio.new_event_loop

    def failing() -> asyncio.AbstractEventLoop:
        if _is_lease_thread() and is_out_of_descriptors:
            raise OSError(errno.EMFILE, "Too many open files")
        return new_event_loop()

    monkeypatch.setattr(asyncio.events, "new_event_loop", failing)
    runs: list[str] = []

    async def handler(job: Job[Any]) -> None:
        runs.append(job.id)
        await asyncio.sleep(1.2)

    with caplog.at_level(logging.ERROR, "tampu.worker"):
        async with consuming(view.server.url, handler) as worker:
            await until(lambda: not worker.consumer.is_healthy, "health is red")
            is_out_of_descriptors = False
            await until(lambda: worker.consumer.is_healthy, "health is green again")
            async with consuming(view.server.url, handler):
                view.add()
                await until(lambda: runs and view.is_settled(), "it is done")
    assert len(runs) == 1, "its lease was renewed"
    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 1
    assert "Too many open files" in errors[0]


async def test_a_worker_whose_lease_thread_cannot_start_can_be_stopped(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_event_loop = asyncio.new_event_loop

    def failing() -> asyncio.AbstractEventLoop:
        if _is_lease_thread():
            raise OSError(errno.EMFILE, "Too many open files")
        return new_event_loop()

    monkeypatch.setattr(asyncio.events, "new_event_loop", failing)
    async with consuming(view.server.url, lambda job: None) as worker:
        await until(lambda: not worker.consumer.is_healthy, "health is red")
        async with asyncio.timeout(2):
            await worker.stop()


async def test_a_worker_that_cannot_renew_on_a_reachable_server_is_unhealthy(
    view: WorkerView, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_connection = True
    renew_leases = calls.renew_leases

    async def failing(*args: Any, **kwargs: Any) -> list[bytes]:
        if _is_lease_thread() and not has_connection:
            raise Unreachable("Too many open files")
        return await renew_leases(*args, **kwargs)

    monkeypatch.setattr(calls, "renew_leases", failing)
    async with consuming(view.server.url, lambda job: None) as worker:
        await until(lambda: worker.consumer.last_read_at is not None and worker.is_connected, "it is up")
        assert worker.consumer.is_healthy
        has_connection = False
        await until(lambda: not worker.consumer.is_healthy, "health is red")
        has_connection = True
        await until(lambda: worker.consumer.is_healthy, "health is green again")
