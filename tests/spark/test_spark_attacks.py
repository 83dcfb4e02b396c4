"""One entry stops no read: a value that a column cannot hold goes into `error`, column by column."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from tampu.spark.options import ReadOptions
from tampu.spark.read.decode import decode_events, decode_jobs, decode_repeatables, decode_results
from tampu.spark.read.readers import read_snapshot
from tampu.wire.codec import EncryptedCodec, QueueCodec
from tampu.wire.envelope import encode_envelope
from tampu.wire.keys import QueueKeys
from tampu.wire.payload import encode_value, wrap_bin
from tampu.wire.repeat import RepeatPattern, StoredSpec, encode_spec

if TYPE_CHECKING:
    from servers.process import Server
    from tampu.spark.options import Stream

GOOD = [b"e", b"completed", b"id", b"a", b"ts", b"5"]


@pytest.mark.parametrize("digits", [b"9" * 5000, b"9" * 20, b"-1", b"\xff", b"1e5"])
def test_a_number_of_thousands_of_digits_goes_into_error(digits: bytes) -> None:
    entries = [(b"1-0", GOOD), (b"1-1", [*GOOD[:5], digits]), (b"1-2", [*GOOD, b"attempt", digits])]
    rows = decode_events("q", entries, "binary").to_pylist()
    assert [row["job_id"] for row in rows] == ["a", "a", "a"]
    assert rows[0]["error"] is None
    assert (rows[1]["ts"], rows[1]["error"][:19]) == (None, "ts is not a number:")
    assert rows[2]["attempt"] is None


def test_a_limit_beyond_a_bigint_goes_into_error() -> None:
    spec = StoredSpec(key="k", job_name="n", pattern=RepeatPattern.every(1000), payload_slot=b"\xc4\x01\x01")
    huge = encode_spec(replace(spec, limit=2**64 - 1, start_after_ms=2**64 - 1))
    rows = decode_repeatables("q", [("a", 5, encode_spec(spec), 0), ("b", 5, huge, 0)], "binary").to_pylist()
    assert [row["spec_key"] for row in rows] == ["a", "b"]
    assert (rows[0]["error"], rows[1]["fire_limit"]) == (None, None)
    assert "fire_limit of 18446744073709551615" in rows[1]["error"]


def test_array_keys_do_not_become_json() -> None:
    entries = [(b"1-0", [b"d", encode_envelope("a", b"\xc4\x04\x81\x91\x01\x02", 5)])]
    (row,) = decode_jobs("q", entries, "json").to_pylist()
    assert (row["job_id"], row["payload"], row["payload_raw"]) == ("a", None, b"\x81\x91\x01\x02")


@pytest.mark.parametrize("score", ["inf", "-inf", "1e308"])
@pytest.mark.parametrize("stream", ["delayed", "repeat"])
def test_an_infinite_score_stops_no_read(server: Server, stream: Stream, score: str) -> None:
    keys, client = QueueKeys("q"), server.client()
    client.xadd(keys.stream, {"d": "x"})
    client.zadd(keys.delayed, {b"\0\0\0\0" + encode_envelope("a", b"\xc0", 5): score})
    client.zadd(keys.repeat, {"k": score})
    client.hset(keys.repeat_spec("k"), mapping={"spec": "x", "fired": "many"})
    options = ReadOptions(url=server.url, queues=("q",), stream=stream)
    (batch,) = read_snapshot(options, "q")
    assert batch.num_rows == 1


def test_payloads_and_results_are_opened_with_the_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    codec = QueueCodec(EncryptedCodec({"k": key}), "q")
    sealed = codec.seal_payload(encode_value({"a": 1}), "task")
    entries = [
        (b"1-0", [b"d", encode_envelope("a", wrap_bin(sealed), 5), b"n", b"task"]),
        (b"1-1", [b"d", encode_envelope("b", wrap_bin(sealed), 5), b"n", b"other"]),
    ]
    assert [row["payload"] for row in decode_jobs("q", entries, "binary").to_pylist()] == [sealed, sealed]
    monkeypatch.setenv("TAMPU_CODEC", "encrypted")
    monkeypatch.setenv("TAMPU_CODEC_KEYS", f"k:{base64.b64encode(key).decode()}")
    good, moved = decode_jobs("q", entries, "json").to_pylist()
    assert (good["payload"], good["error"]) == ('{"a":1}', None)
    assert moved["payload"] is None
    assert "cannot be decrypted" in moved["error"]
    (row,) = decode_results("q", [("j", codec.seal_result(b"\x07", "j"), None)], "json").to_pylist()
    assert row["payload"] == "7"
