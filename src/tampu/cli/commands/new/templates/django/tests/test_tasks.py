"""The tasks, called as functions and run by a worker."""

import asyncio
from datetime import timedelta

import pytest
from django.utils import timezone
from tampu import Queue
from tampu.testing import run_until_empty

from sample_project.models import Signup
from sample_project.tasks import delete_old_signups, queue


@pytest.mark.django_db(transaction=True)
def test_old_signups_are_deleted() -> None:
    Signup.objects.create(email="new@example.com")
    old = Signup.objects.create(email="old@example.com")
    Signup.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=10))
    delete_old_signups.sync.add(days=5)
    assert asyncio.run(run_until_empty(queue)) == 1
    assert [signup.email for signup in Signup.objects.all()] == ["new@example.com"]


def test_a_task_that_fails_is_retried(tampu_queue: Queue) -> None:
    runs: list[str] = []

    @tampu_queue.task(attempts=3)
    def flaky(email: str) -> None:
        runs.append(email)
        if len(runs) < 3:
            raise ConnectionError("the mail server is down")

    flaky.sync.add("ada@example.com")
    assert asyncio.run(run_until_empty(tampu_queue)) == 3
