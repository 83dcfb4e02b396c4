"""Results, compared with those of ChasquiMQ 1.3.0."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
from hypothesis import given

from tampu.errors import DecodeError, EncodeError
from tampu.wire import decode_result, encode_result

from .strategies import examples, values
from .vectors import vectors

NONE = "1.3.0 stores nothing for None; tampu stores nil, to distinguish a finished job from a pending one"


@pytest.mark.parametrize("vector", vectors("codec.json", "result_values", but={"None"}))
def test_a_captured_result_is_written_and_read(vector: dict[str, Any]) -> None:
    text, stored = vector["python_repr"], bytes.fromhex(vector["value_hex"])
    value = math.inf if text == "inf" else ast.literal_eval(text)
    assert encode_result(value) == stored
    assert decode_result(stored) == (list(value) if isinstance(value, tuple) else value)
    assert encode_result(decode_result(stored)) == stored


@pytest.mark.parametrize("vector", vectors("codec.json", "result_values", only={"None"}))
def test_none_is_stored_as_nil_which_peers_read_as_none(vector: dict[str, Any]) -> None:
    assert vector["value_hex"] is None, NONE
    assert encode_result(None) == b"\xc0"
    assert decode_result(b"\xc0") is None


@pytest.mark.parametrize("vector", vectors("cmq_captures.json", "results"))
def test_every_other_result_seen_is_read_and_written(vector: dict[str, Any]) -> None:
    stored = bytes.fromhex(vector["value_hex"])
    assert encode_result(decode_result(stored)) == stored


@given(values)
@examples(50)
def test_any_result_comes_back(value: Any) -> None:
    assert decode_result(encode_result(value)) == value


def test_bytes_that_are_not_a_result_are_rejected() -> None:
    with pytest.raises(EncodeError):
        encode_result(object())
    for stored in (b"", b"\xc1", b"\x01\x02"):
        with pytest.raises(DecodeError):
            decode_result(stored)
