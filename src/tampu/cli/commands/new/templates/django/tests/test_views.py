"""The views: jobs are added after the commit."""

import asyncio
import time
from unittest import mock

import pytest
from django.core import signing
from django.test import Client
from tampu.testing import run_until_empty

from sample_project.models import Signup
from sample_project.tasks import queue

pytestmark = pytest.mark.django_db(transaction=True)  # with real commits


def test_a_signup_is_welcomed(client: Client) -> None:
    added = client.post("/signups", {"email": "ada@example.com"}, content_type="application/json")
    assert added.status_code == 202
    address = added.json()["status"]
    assert client.get(address).json()["welcomed_at"] is None
    assert asyncio.run(run_until_empty(queue)) == 1
    assert client.get(address).json()["welcomed_at"] is not None


def test_only_the_address_that_was_given_out_shows_a_signup(client: Client) -> None:
    added = client.post("/signups", {"email": "ada@example.com"}, content_type="application/json")
    address = added.json()["status"]
    assert client.get(address).json()["email"] == "ada@example.com"
    signup = Signup.objects.get()
    for guess in (str(signup.pk), signing.dumps(signup.pk), address.removeprefix("/signups/") + "A"):
        assert client.get(f"/signups/{guess}").status_code == 404
    with mock.patch("time.time", return_value=time.time() + 2 * 86400):
        assert client.get(address).status_code == 404


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
