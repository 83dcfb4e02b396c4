"""Jobs as producers create them: what is rejected, what is kept, what a copy changes."""

from __future__ import annotations

from typing import Any

import pytest

from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.job import DuplicateJobId, Job, JobId
from tampu.wire.payload import wrap_bin
from tampu.wire.retry import BackoffSpec, JobRetryOverride
from tampu.wire.ulid import decode_ulid_time


def test_a_new_job_has_an_id_of_its_creation_time() -> None:
    job = Job.new({"to": "ada"}, now_ms=lambda: 1794770167273, random_bytes=bytes)
    assert job.id == "01M7GA6SF90000000000000000"
    assert (job.created_at_ms, job.attempt, job.retry, job.name) == (1794770167273, 0, None, "")
    one, other = Job.new(None), Job.new(None)
    assert decode_ulid_time(one.id) == one.created_at_ms
    assert one.id != other.id


def test_a_job_may_have_an_explicit_id() -> None:
    job = Job.with_id("welcome:alice", 42, now_ms=lambda: 7)
    assert (job.id, job.payload, job.created_at_ms) == ("welcome:alice", 42, 7)


def test_data_and_attempts_made_are_aliases() -> None:
    job = Job("a", "n", [1], 3)
    assert job.data is job.payload
    assert job.attempts_made == job.attempt == 3


def test_a_copy_changes_one_thing_and_leaves_the_original() -> None:
    job = Job("a", "n", {"x": 1}, 1, 5)
    retry = JobRetryOverride(3, BackoffSpec.fixed(100))
    assert job.with_retry(retry) == Job("a", "n", {"x": 1}, 1, 5, retry=retry)
    assert job.with_name("m") == Job("a", "m", {"x": 1}, 1, 5)
    assert job.with_attempt(2) == Job("a", "n", {"x": 1}, 2, 5)
    assert job == Job("a", "n", {"x": 1}, 1, 5)
    assert hash(job) == hash(Job("a", "n", {"x": 1}, 1, 5))
    assert job != "a"


def test_an_invalid_slot_raises_only_when_it_is_read() -> None:
    job: Job[Any] = Job.from_wire("a", wrap_bin(b"\xc1"), 0, 0, None)
    assert job.with_attempt(1).payload_slot == b"\xc4\x01\xc1"
    assert job.payload_format == "bin"
    for _ in range(2):
        with pytest.raises(DecodeError):
            _ = job.payload


def test_a_payload_is_decoded_once() -> None:
    job: Job[Any] = Job.from_wire("a", b"\x91\x01", 0, 0, None)
    assert job.payload is job.payload
    assert job.payload_format == "inline"


def test_an_id_knows_whether_it_is_new() -> None:
    assert JobId("a").is_new
    assert not DuplicateJobId("a").is_new
    assert JobId("a") == DuplicateJobId("a") == "a"


#: Arguments of a job, the invalid field, and the expected error.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"id": ""}, "id", "not blank"),
    ({"id": " \t"}, "id", "not blank"),
    ({"id": "a\x00b"}, "id", "without NUL"),
    ({"id": "\ud800"}, "id", "UTF-8"),
    ({"id": 7}, "id", "a str"),
    ({"id": None}, "id", "a str"),
    ({"id": b"a"}, "id", "a str"),
    ({"name": "n" * 257}, "name", "at most 256 bytes"),
    ({"name": "é" * 129}, "name", "at most 256 bytes of UTF-8 (it has 258)"),
    ({"name": "a\x00b"}, "name", "without NUL"),
    ({"name": "\udfff"}, "name", "UTF-8"),
    ({"name": None}, "name", "a str"),
    ({"attempt": -1}, "attempt", "from 0 to 4294967295"),
    ({"attempt": 2**32}, "attempt", "from 0 to 4294967295"),
    ({"attempt": True}, "attempt", "a whole number"),
    ({"attempt": 1.0}, "attempt", "a whole number"),
    ({"created_at_ms": -1}, "created_at_ms", "a whole number"),
    ({"created_at_ms": 2**64}, "created_at_ms", "a whole number"),
    ({"created_at_ms": float("nan")}, "created_at_ms", "a whole number"),
    ({"retry": {"max_attempts": 3}}, "retry", "a JobRetryOverride"),
    ({"payload_format": "json"}, "payload_format", "'bin'"),
]


@pytest.mark.parametrize(("given", "field", "allowed"), BAD, ids=[f"{g}"[:40] for g, _, _ in BAD])
def test_bad_input_is_refused_by_name_value_and_what_is_allowed(
    given: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Job(**{"id": "a", **given})
    text = str(refusal.value)
    assert text.startswith(f"{field} must be ")
    assert allowed in text
    assert repr(next(iter(given.values())))[:60] in text
    assert refusal.value.code == "CMQ-004"
    assert isinstance(refusal.value, ValueError)


def test_copies_refuse_what_the_constructor_refuses() -> None:
    job = Job("a")
    for change in (
        lambda: job.with_name("n" * 257),
        lambda: job.with_attempt(-1),
        lambda: job.with_attempt(2**32),
        lambda: job.with_attempt(True),
        lambda: job.with_retry(3),  # type: ignore[arg-type]  # that is the point
        lambda: job.with_retry(None),  # type: ignore[arg-type]  # that is the point
    ):
        with pytest.raises(ConfigError):
            change()


def test_names_up_to_256_bytes_and_blank_ones_are_fine() -> None:
    for name in ("", " ", "n" * 256, "é" * 128):
        assert Job("a", name).name == name


def test_a_payload_without_a_faithful_form_makes_no_job() -> None:
    with pytest.raises(EncodeError):
        Job("a", data={1, 2})
    with pytest.raises(EncodeError):
        Job("a", data=b"\x01", payload_format="inline")
