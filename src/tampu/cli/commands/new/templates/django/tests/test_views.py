"""The views: jobs are added after the commit."""

import asyncio

import pytest
from django.test import Client
from tampu.testing import run_until_empty

from sample_project.tasks import queue

pytestmark = pytest.mark.django_db(transaction=True)  # with real commits


def test_a_signup_is_welcomed(client: Client) -> None:
    added = client.post("/signups", {"email": "ada@example.com"}, content_type="application/json")
    assert added.status_code == 202
    address = f"/signups/{added.json()['id']}"
    assert client.get(address).json()["welcomed_at"] is None
    assert asyncio.run(run_until_empty(queue)) == 1
    assert client.get(address).json()["welcomed_at"] is not None


def test_signing_up_twice_adds_one_job(client: Client) -> None:
    statuses = [
        client.post("/signups", {"email": "ada@example.com"}, content_type="application/json").status_code
        for _ in range(2)
    ]
    assert statuses == [202, 200]
    assert asyncio.run(run_until_empty(queue)) == 1


def test_what_is_not_an_email_is_refused(client: Client) -> None:
    for body in ("[]", "{}", '{"email": "ada"}', "no json"):
        assert client.post("/signups", body, content_type="application/json").status_code == 400
