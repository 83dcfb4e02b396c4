"""The sinks as plain classes: what is written, and that nothing is written twice however often a task runs."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from spark.filling import T0, Filled
from tampu.errors import ConfigError, EncodeError, QueueFullError, RedisError
from tampu.spark.options import WriteOptions
from tampu.spark.write.rows import JobRow, LetterRow, check_job_columns, check_letter_columns, job_rows, letter_rows
from tampu.spark.write.sinks import JobSink, ReplaySink, RowsDifferError, TaskIdentity, Written, _replayed
from tampu.wire.codec import EncryptedCodec, QueueCodec
from tampu.wire.dlq import DlqEntry, encode_dlq_fields
from tampu.wire.envelope import decode_job, encode_envelope
from tampu.wire.extras import JobExtras, encode_extras
from tampu.wire.payload import decode_slot, encode_slot, encode_value, wrap_bin

TASK = TaskIdentity("query", "7", 0)
KEY = bytes(range(32))


def options_of(filled: Filled, **options: str) -> WriteOptions:
    return WriteOptions.parse({"url": filled.url, "queue": "q"} | options)


def rows(count: int, start: int = 0, **more: Any) -> list[tuple[str, JobRow]]:
    return [("q", JobRow(encode_value({"n": number}), **more)) for number in range(start, start + count)]


def write(filled: Filled, given: list[tuple[str, JobRow]], task: TaskIdentity = TASK, **options: str) -> Written:
    return JobSink(options_of(filled, **options), task).write(given)


@pytest.mark.servers
def test_a_task_that_is_run_again_adds_nothing(filled: Filled) -> None:
    assert write(filled, rows(1_000)) == Written(added=1_000)
    assert write(filled, rows(1_000)) == Written(repeated=1_000)
    assert [payload["n"] for payload in filled.payloads()] == list(range(1_000))


@pytest.mark.servers
def test_a_task_that_died_halfway_adds_the_rest(filled: Filled) -> None:
    write(filled, rows(512))  # two whole chunks of what the task was about to write
    assert write(filled, rows(1_000)) == Written(added=488, repeated=512)
    assert [payload["n"] for payload in filled.payloads()] == list(range(1_000))


def test_another_partition_batch_or_query_is_another_write(filled: Filled) -> None:
    for task in (TASK, TaskIdentity("query", "7", 1), TaskIdentity("query", "8", 0), TaskIdentity("other", "7", 0)):
        assert write(filled, rows(3), task).added == 3
    assert len(filled.payloads()) == 12


def test_other_rows_in_a_second_run_are_an_error_and_not_written(filled: Filled) -> None:
    write(filled, rows(10))
    with pytest.raises(RowsDifferError, match="dedupe=jobid"):
        write(filled, rows(10, start=5))
    assert len(filled.payloads()) == 10


@pytest.mark.parametrize("change", [{"name": "other"}, {"run_at_ms": T0}, {"job_id": "x"}])
def test_rows_that_differ_in_more_than_the_payload_are_told_apart(filled: Filled, change: dict[str, Any]) -> None:
    write(filled, [("q", JobRow(encode_value(1), "work", "a", T0 + 1))])
    changed = JobRow(encode_value(1), "work", "a", T0 + 1)._replace(**change)
    with pytest.raises(RowsDifferError):
        write(filled, [("q", changed)])
    write(filled, rows(3, name="a"), TaskIdentity("query", "8", 0))
    with pytest.raises(RowsDifferError):
        write(filled, rows(3, name="b"), TaskIdentity("query", "8", 0))


def test_without_dedupe_a_second_run_adds_again(filled: Filled) -> None:
    for _ in range(2):
        write(filled, rows(10), dedupe="none")
    assert len(filled.payloads()) == 20


@pytest.mark.servers
def test_by_job_id_the_order_does_not_matter(filled: Filled) -> None:
    given = [("q", JobRow(encode_value(number), job_id=f"id-{number}")) for number in range(600)]
    assert write(filled, given, dedupe="jobid") == Written(added=600)
    assert write(filled, given[::-1], TaskIdentity("x", "1", 5), dedupe="jobid") == Written(duplicates=600)
    assert {job.id for job in filled.waiting()} == {f"id-{number}" for number in range(600)}


def test_by_content_the_same_row_is_the_same_job(filled: Filled) -> None:
    assert write(filled, rows(5), dedupe="jobid").added == 5
    assert write(filled, rows(6), TaskIdentity("x", "1", 5), dedupe="jobid") == Written(added=1, duplicates=5)


@pytest.mark.servers
def test_a_run_time_makes_a_delayed_job_that_can_be_cancelled(filled: Filled) -> None:
    later = T0 * 2
    given = [("q", JobRow(encode_value(1), "tick", run_at_ms=later)), ("q", JobRow(encode_value(2), run_at_ms=T0))]
    assert write(filled, given).added == 2
    assert filled.payloads() == [2]  # its time has passed
    ((_, score),) = filled.client.zrange(filled.keys().delayed, 0, -1, withscores=True)
    assert int(score) == later
    assert filled.client.hvals(filled.keys().due) == [later.to_bytes(6, "big")]


@pytest.mark.servers
@pytest.mark.parametrize("run_at_ms", [None, T0 + 10**12])
def test_an_old_cancel_does_not_cancel_a_new_job(filled: Filled, run_at_ms: int | None) -> None:
    keys = filled.keys()
    for job_id in ("order-1", "order-2"):
        filled.client.set(keys.cancel_mark(job_id), "r")
    filled.client.set(keys.dedup_marker("order-2"), "1")  # added before: the cancel is of that job
    given = [("q", JobRow(b"\x01", job_id=job_id, run_at_ms=run_at_ms)) for job_id in ("order-1", "order-2")]
    assert write(filled, given) == Written(added=1, duplicates=1)
    assert [filled.client.exists(keys.cancel_mark(job_id)) for job_id in ("order-1", "order-2")] == [0, 1]


def test_a_backfill_is_spread(filled: Filled) -> None:
    write(filled, rows(2_000), spread="6h")
    due = [score for _, score in filled.client.zrange(filled.keys().delayed, 0, -1, withscores=True)]
    assert len(due) + len(filled.payloads()) == 2_000
    hours = [0] * 6
    for score in due:
        hours[int((score - due[0]) // 3_600_000)] += 1
    assert min(hours) > 230


def test_writing_pauses_while_the_queue_is_long(filled: Filled) -> None:
    filled.jobs(50)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            filled.client.xtrim(filled.keys().stream, maxlen=0, approximate=False)  # a worker did them

    sink = JobSink(options_of(filled, maxWaiting="60"), TASK, sleep=sleep)
    assert sink.write(rows(20)) == Written(added=20)
    assert len(pauses) == 3


def test_a_queue_that_stays_full_is_an_error_in_the_end(filled: Filled) -> None:
    filled.jobs(50)
    sink = JobSink(options_of(filled, maxWaiting="60", waitTimeout="5s"), TASK, sleep=lambda _: None)
    with pytest.raises(QueueFullError, match="maxWaiting=60"):
        sink.write(rows(20))
    assert len(filled.payloads()) == 50


def test_several_queues_by_a_column(filled: Filled) -> None:
    given = [(f"q{number % 2}", JobRow(encode_value(number))) for number in range(600)]
    assert write(filled, given).added == 600
    assert filled.payloads("q0") == list(range(0, 600, 2))


def test_markers_expire(filled: Filled) -> None:
    write(filled, rows(1))
    (marker,) = filled.client.keys("*sparkq*")
    assert 6.9 * 86400 < filled.client.ttl(marker) <= 7 * 86400


def test_a_key_of_another_type_writes_nothing(filled: Filled) -> None:
    filled.client.set(filled.keys().delayed, "x")
    with pytest.raises(Exception, match="WRONGTYPE"):
        write(filled, rows(5))
    assert filled.payloads() == []
    assert filled.client.keys("*sparkq*") == []


def exhaust_entry_ids(filled: Filled) -> None:
    """Make every XADD to the stream fail, as no ID is left."""
    filled.client.xadd(filled.keys().stream, {"d": "x"}, id=f"{2**64 - 1}-{2**64 - 1}")


def test_a_chunk_that_is_refused_leaves_no_marker(filled: Filled) -> None:
    exhaust_entry_ids(filled)
    for _ in range(2):
        with pytest.raises(RedisError, match="exhausted"):
            write(filled, rows(5))
    assert filled.client.keys("*sparkq*") == []


def test_a_chunk_that_is_refused_in_part_is_not_taken_for_written(filled: Filled) -> None:
    exhaust_entry_ids(filled)
    given = [("q", JobRow(encode_value(1), run_at_ms=T0 * 2)), ("q", JobRow(encode_value(2)))]
    with pytest.raises(RedisError, match="refused some of these jobs"):
        write(filled, given)
    with pytest.raises(RowsDifferError):  # and not a silent loss of the second job
        write(filled, given)
    assert filled.client.zcard(filled.keys().delayed) == 1


# --- columns and rows


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"name": "string"}, "column payload is missing"),
        ({"payload": "decimal(10,2)"}, "column payload is of type decimal"),
        ({"payload": "struct<a:date>"}, "date has no faithful"),
        ({"payload": "map<int,string>"}, "keys of a map"),
        ({"payload": "string", "run_at": "string"}, "column run_at must be of type timestamp"),
        ({"payload": "string", "runat": "timestamp"}, "unknown column 'runat'"),
    ],
)
def test_wrong_columns_are_named(columns: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_job_columns(columns, has_queue_option=True)


def test_a_table_can_be_written_back_as_it_was_read() -> None:
    check_job_columns({"payload": "binary", "entry_id": "string", "error": "string"}, has_queue_option=True)
    check_letter_columns({"entry_id": "string", "payload": "string", "reason": "string"}, has_queue_option=True)
    with pytest.raises(ConfigError, match="option queue"):
        check_job_columns({"payload": "binary"}, has_queue_option=False)
    with pytest.raises(ConfigError, match="entry_id"):
        check_letter_columns({"payload": "binary"}, has_queue_option=True)


def encoded(kind: str, values: list[Any], **columns: list[Any]) -> list[tuple[str, JobRow]]:
    batch = pa.RecordBatch.from_pydict({"payload": values, **columns})
    return list(job_rows(batch, {"payload": kind}, "", "q"))


def test_payloads_of_every_type() -> None:
    assert encoded("string", ['{"a": 1}', None])[0][1].packed == encode_value({"a": 1})
    assert encoded("string", ['{"a": 1}', None])[1][1].packed == b"\xc0"
    assert encoded("binary", [encode_value([1])])[0][1].packed == encode_value([1])
    assert encoded("struct<a:int>", [{"a": 5}])[0][1].packed == encode_value({"a": 5})


def test_all_columns_of_a_job() -> None:
    instant = datetime(2030, 1, 1, tzinfo=UTC)
    backoff = json.dumps({"kind": "fixed", "delay_ms": 50})
    ((queue, row),) = encoded(
        "string",
        ["1"],
        queue=["other"],
        name=["n"],
        job_id=["id"],
        run_at=pa.array([instant], pa.timestamp("us", "UTC")),
        max_attempts=[5],
        backoff=[backoff],
    )
    assert (queue, row.name, row.job_id, row.run_at_ms) == ("other", "n", "id", int(instant.timestamp() * 1000))
    assert row.retry is not None
    assert row.retry.max_attempts == 5
    assert row.retry.backoff is not None
    assert row.retry.backoff.delay_ms == 50


@pytest.mark.parametrize(
    ("kind", "value", "columns", "named"),
    [
        ("string", "{", {}, "column payload of row 0"),
        ("string", str(2**70), {}, "column payload of row 0"),
        ("binary", b"\xc1", {}, "column payload of row 0"),
        ("string", "1", {"name": ["x" * 300]}, "column name of row 0"),
        ("string", "1", {"job_id": [" "]}, "column job_id of row 0"),
        ("string", "1", {"backoff": ["{}"]}, "column backoff of row 0"),
        ("string", "1", {"queue": ["a{"]}, "column queue of row 0"),
    ],
)
def test_a_row_that_cannot_be_encoded_names_its_column(
    kind: str, value: Any, columns: dict[str, Any], named: str
) -> None:
    with pytest.raises(EncodeError, match=named):
        encoded(kind, [value], **columns)


# --- replays


@pytest.mark.servers
def test_letters_are_replayed_once_repaired_and_counted(filled: Filled) -> None:
    ids = [filled.letter(f"job-{number}", {"amount": str(number)}) for number in range(450)]
    given = [("q", LetterRow(dlq_id, encode_value({"amount": number}))) for number, dlq_id in enumerate(ids)]
    sink = ReplaySink(options_of(filled, stream="dlq"))
    assert sink.write(given) == Written(added=450)
    assert ReplaySink(options_of(filled, stream="dlq")).write(given) == Written(skipped=450)
    jobs = filled.waiting()
    assert [job.payload["amount"] for job in jobs] == list(range(450))
    assert {job.attempt for job in jobs} == {0}
    assert jobs[0].created_at_ms == T0
    assert filled.client.xlen(filled.keys().dlq) == 0
    assert filled.client.hget(filled.keys().replays, "job-7") == b"1"


def test_a_letter_without_a_new_payload_keeps_its_own(filled: Filled) -> None:
    dlq_id = filled.letter("a", {"x": 1})
    batch = pa.RecordBatch.from_pydict({"entry_id": [dlq_id], "payload": pa.array([None], pa.string())})
    given = list(letter_rows(batch, {"entry_id": "string", "payload": "string"}, "q"))
    assert ReplaySink(options_of(filled, stream="dlq")).write(given).added == 1
    assert filled.payloads() == [{"x": 1}]


def test_a_replayed_letter_keeps_headers_timeout_and_expiry(filled: Filled) -> None:
    extras = JobExtras({"tenant": "acme"}, 5_000, T0 + 10**12)
    envelope = encode_envelope("a", encode_slot({"x": 1}), T0, 3) + encode_extras(extras)
    fields = encode_dlq_fields(DlqEntry(dlq_id="", source_id="1-1", reason="retries_exhausted", payload=envelope))
    dlq_id = filled.xadd(filled.keys().dlq, *fields).decode()
    letter = LetterRow(dlq_id, encode_value({"x": 2}))
    assert ReplaySink(options_of(filled, stream="dlq")).write([("q", letter)]).added == 1
    (job,) = filled.waiting()
    assert (job.payload, job.extras) == ({"x": 2}, extras._replace(expires_at_ms=None))


def test_a_letter_that_cannot_be_read_stays(filled: Filled) -> None:
    dlq_id = filled.xadd(filled.keys().dlq, "d", b"\xc1", "source_id", "1-1", "reason", "malformed").decode()
    assert ReplaySink(options_of(filled, stream="dlq")).write([("q", LetterRow(dlq_id))]) == Written(skipped=1)
    assert filled.client.xlen(filled.keys().dlq) == 1


@pytest.mark.parametrize("more", [{}, {"job_id": "a"}], ids=["alike", "each"])
def test_jobs_are_sealed_with_the_keys_of_the_environment(
    filled: Filled, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_CODEC", "encrypted")
    monkeypatch.setenv("TAMPU_CODEC_KEYS", f"k:{base64.b64encode(KEY).decode()}")
    codec = QueueCodec(EncryptedCodec({"k": KEY}), "q")
    assert write(filled, rows(1, name="work", **more)) == Written(added=1)
    assert write(filled, rows(1, name="work", **more)) == Written(repeated=1)
    ((_, fields),) = filled.client.xrange("{chasqui:q}:stream")
    slot = decode_job(fields[b"d"]).payload_slot
    assert decode_slot(codec.open_slot(slot, "work")) == {"n": 0}


@pytest.mark.parametrize(
    "row", [{}, {"packed": encode_value(2)}, {"name": "other"}], ids=["as it is", "payload", "name"]
)
def test_replayed_letters_stay_sealed(filled: Filled, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMPU_CODEC", "encrypted")
    monkeypatch.setenv("TAMPU_CODEC_KEYS", f"k:{base64.b64encode(KEY).decode()}")
    codec = QueueCodec(EncryptedCodec({"k": KEY}), "q")
    envelope = encode_envelope("a", wrap_bin(codec.seal_payload(encode_value(1), "work")), 5)
    letter = DlqEntry(dlq_id="", source_id="1-0", reason="malformed", payload=envelope, name="work")
    fields = encode_dlq_fields(letter)
    replayed = _replayed(LetterRow("1-0", **row), fields, codec)
    assert replayed is not None
    slot = decode_job(replayed.envelope).payload_slot
    assert decode_slot(codec.open_slot(slot, row.get("name", "work"))) == (2 if "packed" in row else 1)
