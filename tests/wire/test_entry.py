"""Fields of stream entries as the server returns them."""

from __future__ import annotations

import pytest

from tampu.errors import EncodeError
from tampu.wire.entry import job_fields, read_job_fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([b"d", b"E"], (b"E", "")),
        ([b"d", b"E", b"n", b"name"], (b"E", "name")),
        ([b"n", b"name", b"d", b"E"], (b"E", "name")),
        ([b"d", b"E", b"n", b""], (b"E", "")),
        ([b"d", b"E", b"n", b"\xff"], (b"E", "")),  # not UTF-8
        ([b"d", b"E", b"x", b"y"], (b"E", "")),
        ([b"x", b"y", b"d", b"E", b"n", b"name", b"z", b""], (b"E", "name")),
        ([b"d", b"E", b"d", b"F", b"n", b"one", b"n", b"two"], (b"E", "one")),  # the first counts
        ([b"D", b"E"], (None, "")),
        ([b"n", b"d"], (None, "d")),
        ([], (None, "")),
        ([b"d"], (None, "")),
        ([b"d", b""], (b"", "")),
    ],
)
def test_the_envelope_and_the_name_are_found(fields: list[bytes], expected: tuple[bytes | None, str]) -> None:
    assert read_job_fields(fields) == expected


def test_an_empty_name_is_left_out() -> None:
    assert job_fields(b"E", "") == [b"d", b"E"]
    assert job_fields(b"E", "é") == [b"d", b"E", b"n", "é".encode()]


def test_a_name_utf8_cannot_carry_is_an_encode_error() -> None:
    with pytest.raises(EncodeError, match=r"name 'a.ud800'"):
        job_fields(b"E", "a\ud800")
