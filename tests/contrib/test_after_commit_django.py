"""Jobs added when a Django transaction commits, on real SQLite databases."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import TestCase

from contrib.conftest import Mail
from tampu import EncodeError, QueueFullError
from tampu.contrib.django import after_commit, fresh_connections

if TYPE_CHECKING:
    from servers.process import Server

pytestmark = pytest.mark.usefixtures("django_databases")


def insert(email: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO users VALUES (%s)", [email])


@transaction.atomic
def sign_up(mail: Mail, *emails: str) -> None:
    for email in emails:
        insert(email)
        after_commit(mail.welcome).add(email)


def test_a_job_is_added_when_the_transaction_commits_and_not_before(mail: Mail) -> None:
    with transaction.atomic():
        insert("ada")
        after_commit(mail.welcome).add("ada")
        assert mail.waiting() == []
    assert mail.waiting() == ["ada"]


def test_outside_a_transaction_a_job_is_added_at_once(mail: Mail) -> None:
    after_commit(mail.welcome).add("ada")
    assert mail.waiting() == ["ada"]


def test_nothing_is_added_when_the_transaction_rolls_back(mail: Mail) -> None:
    with pytest.raises(IntegrityError):
        sign_up(mail, "ada", "ada")
    assert mail.waiting() == []


def test_a_savepoint_that_rolls_back_takes_its_jobs_along(mail: Mail) -> None:
    with transaction.atomic():
        after_commit(mail.welcome).add("before")
        with pytest.raises(IntegrityError):
            sign_up(mail, "ada", "ada")
        sign_up(mail, "grace")
        assert mail.waiting() == []
    assert mail.waiting() == ["before", "grace"]


def test_the_transaction_of_another_database_can_be_meant(mail: Mail) -> None:
    with transaction.atomic(using="other"):
        with transaction.atomic():
            after_commit(mail.welcome, using="other").add("ada")
        assert mail.waiting() == []
    assert mail.waiting() == ["ada"]


def test_wrong_adds_fail_before_the_commit(mail: Mail) -> None:
    wrong: Any = object()
    with transaction.atomic(), pytest.raises(EncodeError):
        after_commit(mail.welcome).add_bulk(["fine", wrong])
    assert mail.waiting() == []


def test_the_error_of_a_failed_add_is_raised_or_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    mail = Mail(server.url, max_stream_len=1)
    mail.welcome.sync.add("first")
    with pytest.raises(QueueFullError) as raised, transaction.atomic():
        after_commit(mail.welcome).add("refused")
    assert raised.value.__notes__ == [
        "The transaction is committed, but 1 of its 1 jobs were not confirmed: welcome (queue mail)"
    ]
    with caplog.at_level(logging.ERROR, "django.db.backends.base"), transaction.atomic():
        after_commit(mail.welcome, robust=True).add("refused too")
    assert "Error calling" in caplog.text
    mail.queue.sync.close()


def test_djangos_test_case_runs_the_adds_on_request(mail: Mail) -> None:
    with transaction.atomic():
        with TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
            after_commit(mail.welcome).add_bulk(["ada", "grace"])
        assert mail.waiting() == ["ada", "grace"]
        transaction.set_rollback(True)
    assert len(callbacks) == 1
    assert mail.waiting() == ["ada", "grace"]


def test_a_task_can_close_outdated_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    @fresh_connections
    def count() -> int:
        connection.ensure_connection()
        assert connection.connection is not None
        return 1

    assert count() == 1
    assert connection.connection is None  # CONN_MAX_AGE is 0: no connection outlives the call


def test_django_is_imported_by_its_module_only() -> None:
    code = "import sys, tampu.queue, tampu.worker, tampu.testing, tampu.contrib\nassert 'django' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
