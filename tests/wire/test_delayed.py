"""Members of the delayed set, compared with those of ChasquiMQ 1.3.0."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tampu.errors import DecodeError, EncodeError
from tampu.wire import decode_delayed_member, decode_job, encode_delayed_member, encode_job

from .strategies import examples, names
from .vectors import vectors


@pytest.mark.parametrize("vector", vectors("codec.json", "delayed_member"))
def test_a_captured_member_is_written_and_read(vector: dict[str, Any]) -> None:
    member, envelope = bytes.fromhex(vector["member_hex"]), bytes.fromhex(vector["envelope_hex"])
    assert decode_delayed_member(member) == (vector["name"], envelope)
    assert encode_delayed_member(vector["name"], envelope) == member
    assert encode_job(decode_job(envelope)) == envelope


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "delayed_members"))
def test_every_member_and_index_seen_is_read_and_written(vector: dict[str, Any]) -> None:
    member = bytes.fromhex(vector["member_hex"])
    name, envelope = decode_delayed_member(member)
    assert encode_delayed_member(name, encode_job(decode_job(envelope))) == member


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "retries"))
def test_a_retry_is_the_same_job_with_one_attempt_more(vector: dict[str, Any]) -> None:
    member = bytes.fromhex(vector["member_hex"])
    name, envelope = decode_delayed_member(member)
    job = decode_job(envelope, name)
    before = job.with_attempt(job.attempt - 1)
    assert encode_delayed_member(name, encode_job(before.with_attempt(before.attempt + 1))) == member


@given(names, st.binary(max_size=60))
@examples(60)
def test_any_member_comes_back(name: str, envelope: bytes) -> None:
    member = encode_delayed_member(name, envelope)
    assert decode_delayed_member(member) == (name, envelope)
    assert member == len(name.encode()).to_bytes(4, "little") + name.encode() + envelope


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (b"", "got only 0 bytes"),
        (b"\x00\x00", "got only 2 bytes"),  # stopped 1.3.0's promoter for good
        (b"\xff\xff\x00\x00abc", "claims a name of 65535 bytes"),
        (b"\xff\xff\xff\xff", "claims a name of 4294967295 bytes"),
        (b"\x01\x00\x00\x00\xffE", "not UTF-8"),
    ],
)
def test_a_member_with_a_wrong_length_is_a_decode_error(member: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        decode_delayed_member(member)


def test_a_name_utf8_cannot_carry_is_an_encode_error() -> None:
    with pytest.raises(EncodeError, match=r"name '.ud800' cannot be encoded as UTF-8"):
        encode_delayed_member("\ud800", b"")
