"""Tests of the API over HTTP without a network, with a running worker."""

from collections.abc import AsyncIterator

import httpx
import pytest
from tampu import Worker

from sample_project.api import app
from sample_project.tasks import queue


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with Worker(queue) as worker:
        yield worker


@pytest.mark.usefixtures("worker")
async def test_a_result_is_waited_for(client: httpx.AsyncClient) -> None:
    answer = await client.post("/word-counts", json={"text": "to be or not to be"})
    assert answer.json() == {"to": 2, "be": 2, "or": 1, "not": 1}


async def test_a_job_is_added_and_found_again(client: httpx.AsyncClient) -> None:
    added = await client.post("/welcomes", json={"email": "ada@example.com"})
    assert added.status_code == 202
    status = await client.get(f"/jobs/{added.json()['job']}")
    assert status.json() == {"state": "waiting", "result": None, "error": None}


async def test_a_job_that_was_never_added_is_not_found(client: httpx.AsyncClient) -> None:
    answer = await client.get("/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert answer.status_code == 404
