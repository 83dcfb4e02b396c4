"""Consumer names: each must belong to one process only."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import consuming
from support.waiting import until

if TYPE_CHECKING:
    from consume.views import WorkerView
    from consume.workers import Fleet
    from tampu.wire.job import Job


async def noop(job: Job[Any]) -> None:
    pass


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "consumer_id" in record.getMessage()]


@pytest.mark.slow
async def test_two_workers_with_the_same_consumer_id_warn_once_each(
    view: WorkerView, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tampu.worker"):
        async with (
            consuming(view.server.url, noop, consumer_id="twin"),
            consuming(view.server.url, noop, consumer_id="twin"),
        ):
            await until(lambda: len(_warnings(caplog)) == 2, "both have noticed")
            await asyncio.sleep(1)  # several renewals
    first, second = _warnings(caplog)
    assert first == second
    assert "consumer_id 'twin' (queue 'q', group 'default')" in first


@pytest.mark.slow
async def test_workers_with_their_own_names_do_not_warn(view: WorkerView, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tampu.worker"):
        async with (
            consuming(view.server.url, noop, consumer_id="one"),
            consuming(view.server.url, noop, consumer_id="two"),
        ):
            await asyncio.sleep(1)
    assert _warnings(caplog) == []


@pytest.mark.slow
async def test_a_worker_that_takes_the_name_of_a_killed_one_does_not_warn(
    view: WorkerView, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first = fleet.start(view.server.url, "sleeping", consumer_id="same")
    await until(lambda: ":owner:default:same" in view.all_keys(), "it has renewed")
    first.kill()
    with caplog.at_level(logging.WARNING, "tampu.worker"):
        async with consuming(view.server.url, noop, consumer_id="same"):
            await asyncio.sleep(1)
    assert _warnings(caplog) == []
