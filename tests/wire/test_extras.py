"""Options behind the envelope: they survive every step of a job, and other bytes are not mistaken for them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.errors import ConfigError, DecodeError
from tampu.wire import envelope
from tampu.wire.envelope import decode_job, encode_envelope, encode_job
from tampu.wire.extras import JobExtras, check_headers, decode_extras, encode_extras, split_extras

ENVELOPE = encode_envelope("id", b"\xc0", 1)
TEXTS = st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=50), max_size=10)
TIMES = st.none() | st.integers(1, 2**62)


@given(TEXTS, TIMES, TIMES)
def test_options_come_back_as_they_were(headers: dict[str, str], timeout: int | None, expires: int | None) -> None:
    extras = JobExtras(headers, timeout, expires)
    tail = encode_extras(extras)
    assert split_extras(ENVELOPE + tail) == (ENVELOPE, tail)
    assert decode_extras(tail) == extras
    job = decode_job(ENVELOPE + tail, "mail")
    assert (job.id, job.name, job.headers, job.extras) == ("id", "mail", headers, extras)
    assert encode_job(job) == ENVELOPE + tail
    assert encode_job(job.with_attempt(3).with_attempt(0)) == ENVELOPE + tail


def test_a_job_without_options_has_no_bytes_behind_its_envelope() -> None:
    assert encode_extras(JobExtras()) == b""
    assert decode_job(ENVELOPE).headers == {}


@given(st.binary(max_size=40))
def test_other_bytes_behind_an_envelope_are_ignored_as_before(garbage: bytes) -> None:
    job = decode_job(ENVELOPE + garbage)
    assert job.id == "id"
    assert isinstance(job.headers, dict)


@pytest.mark.parametrize("tail", [b"\xc1\xc0\x00\x01\xc1T", b"\xc1\x00\x00\xc1T", b"\xc1\x81\xa1h\x01\x00\x04\xc1T"])
def test_unreadable_options_are_ignored(tail: bytes) -> None:
    assert decode_extras(tail) == JobExtras()


@pytest.mark.parametrize("headers", [{"a": 1}, {1: "a"}, {"": "a"}, ["a"], "a"])
def test_headers_are_text_to_text(headers: object) -> None:
    with pytest.raises(ConfigError, match="headers must be a mapping of text to text"):
        check_headers(headers)


def test_large_headers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 8,192 bytes"):
        encode_extras(JobExtras({"a": "x" * 9000}))


FRAME = b"\xc1\x00\x00\xc1T"


def test_an_entry_of_many_frames_is_read_once() -> None:
    """Each frame was taken for the options of what came before it: 5 KB of them exceeded Python's stack."""
    for frames in (1000, 200_000):
        with pytest.raises(DecodeError, match="not a job envelope"):
            decode_job(FRAME * frames)
    job = decode_job(ENVELOPE + FRAME * 1000)
    assert (job.id, job._tail) == ("id", FRAME)


def test_the_envelope_before_many_frames_is_not_read_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    decode = envelope._decode_envelope

    def counted(data: bytes) -> Any:
        reads.append(len(data))
        return decode(data)

    monkeypatch.setattr(envelope, "_decode_envelope", counted)
    decode_job(ENVELOPE + FRAME * 1000)
    assert len(reads) == 2
