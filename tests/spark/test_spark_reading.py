"""Partitions, gaps and readers as plain classes: no Spark session, a real server."""

from __future__ import annotations

import gc
import json
import logging
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from spark.filling import T0, Filled
from tampu.errors import ConfigError
from tampu.spark.lake.contracts import Contracts, check_queue
from tampu.spark.options import STREAMS, ReadOptions
from tampu.spark.read import partitions, readers
from tampu.spark.read.batch import arrow_schema, spark_schema
from tampu.spark.read.offsets import DataLossError, EntryId, Extent, Position, count_between
from tampu.spark.read.partitions import Span, cut
from tampu.spark.read.plan import FIND_QUEUES_EVERY_SECS, StreamPlanner, plan_batch
from tampu.spark.read.readers import BatchReader, PushdownReader, read_snapshot, read_span
from tampu.spark.server import QueueServer, gc_paused, made_with_gc_paused, span_pages
from tampu.wire.entry import encode_delayed_member
from tampu.wire.envelope import encode_envelope
from tampu.wire.payload import encode_slot, encode_value
from tampu.wire.repeat import RepeatableSpec, RepeatPattern, encode_spec

if TYPE_CHECKING:
    from collections.abc import Iterator


def options_of(filled: Filled, *, streaming: bool | None = False, **options: str) -> ReadOptions:
    return ReadOptions.parse({"url": filled.url, "queue": "q"} | options, streaming=streaming)


def rows_of(options: ReadOptions) -> list[dict[str, Any]]:
    if options.stream in ("delayed", "repeat", "results"):
        batches = [batch for queue in options.queues for batch in read_snapshot(options, queue)]
    else:
        batches = [batch for span in plan_batch(options) for batch in read_span(options, span)]
    for batch in batches:
        assert batch.schema == arrow_schema(options.stream, options.payload)
    return [row for batch in batches for row in batch.to_pylist()]


def count_rows(options: ReadOptions, spans: list[Span]) -> int:
    return sum(batch.num_rows for span in spans for batch in read_span(options, span))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("payload", ["binary", "json", "none"])
def test_the_arrow_schema_is_the_one_spark_expects(stream: Any, payload: Any) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import BinaryType, LongType, StringType, StructType, TimestampType

    types = {"STRING": StringType(), "BINARY": BinaryType(), "BIGINT": LongType(), "TIMESTAMP": TimestampType()}
    struct = StructType()
    for column in spark_schema(stream, payload).split(", "):
        name, kind = column.split(" ")
        struct.add(name.strip("`"), types[kind])
    assert to_arrow_schema(struct, timezone="UTC") == arrow_schema(stream, payload)


@pytest.mark.servers
def test_jobs_are_read_with_their_envelopes(filled: Filled) -> None:
    filled.jobs(2_600)
    rows = rows_of(options_of(filled, stream="jobs", payload="json"))
    assert [row["job_id"] for row in rows] == [f"job-{number}" for number in range(2_600)]
    last = rows[-1]
    assert (last["name"], last["attempt"], last["payload"]) == ("work", 0, '{"n":2599}')
    assert last["created_at"].timestamp() * 1000 == T0 + 2599
    assert f"{last['entry_ms']}-{last['entry_seq']}" == last["entry_id"]
    assert last["error"] is None


def test_what_cannot_be_decoded_becomes_a_row_with_its_bytes(filled: Filled) -> None:
    filled.xadd(filled.keys().stream, "x", "y")
    filled.xadd(filled.keys().stream, "d", b"\xc1")
    filled.jobs(1)
    bad, worse, good = rows_of(options_of(filled, stream="jobs"))
    assert bad["error"] == "no field d"
    assert msgspec.msgpack.decode(bad["raw"]) == [b"x", b"y"]
    assert worse["raw"] == b"\xc1"
    assert "not a job envelope" in worse["error"]
    assert msgspec.msgpack.decode(good["payload"]) == {"n": 0}


def test_a_delayed_member_that_cannot_be_decoded_is_kept_whole(filled: Filled) -> None:
    members = [b"\x04\x00\x00\x00mail\xc1", b"\x01"]
    filled.client.zadd(filled.keys().delayed, {member: number for number, member in enumerate(members)})
    rows = rows_of(options_of(filled, stream="delayed"))
    assert [row["raw"] for row in rows] == members
    assert all(row["error"] for row in rows)


def test_an_event_with_a_bad_number_keeps_the_rest(filled: Filled) -> None:
    filled.events(1)
    filled.xadd(filled.keys().events, "e", "failed", "id", "", "ts", "soon", "more", "1", "reason", b"\xff")
    filled.xadd(filled.keys().events, "e", "failed", "id", "j", "ts", 2**62)
    good, bad, late = rows_of(options_of(filled))
    assert (good["event"], good["job_id"], good["duration_us"], good["worker"]) == ("completed", "job-1", 1, "w")
    assert good["ts"].timestamp() * 1000 == T0 + 1
    assert (bad["event"], bad["ts"], bad["job_id"], bad["extra"]) == ("failed", None, None, '{"more":"1"}')
    assert bad["reason"] == "\ufffd"
    assert "ts is not a number" in bad["error"]
    assert late["ts"] is None
    assert "9999" in late["error"]


@pytest.mark.parametrize("text", ["-5", "0x10", "+1", "", "1_000"])
def test_a_number_decodes_the_same_next_to_a_malformed_one(text: str, filled: Filled) -> None:
    def attempts() -> list[tuple[Any, bool]]:
        return [(row["attempt"], row["error"] is None) for row in rows_of(options_of(filled))]

    filled.xadd(filled.keys().events, "e", "failed", "id", "a", "attempt", text)
    assert attempts() == [(None, False)]
    filled.xadd(filled.keys().events, "e", "failed", "id", "b", "attempt", "nonsense")
    filled.xadd(filled.keys().events, "e", "failed", "id", "c", "attempt", "7")
    assert attempts() == [(None, False), (None, False), (7, True)]


def test_a_payload_json_cannot_hold_stays_binary(filled: Filled) -> None:
    filled.letter("a", {"bytes": b"\x00"})
    filled.letter("b", {"text": "é"})
    held, shown = rows_of(options_of(filled, stream="dlq", payload="json"))
    assert held["payload"] is None
    assert held["payload_raw"] == encode_value({"bytes": b"\x00"})
    assert (shown["payload"], shown["payload_raw"]) == ('{"text":"é"}', None)
    assert (shown["reason"], shown["error_type"], shown["last_error"], shown["attempts"]) == (
        *("retries_exhausted", "ValueError", "no", 3),
    )


@pytest.mark.servers
def test_snapshots(filled: Filled) -> None:
    filled.delayed(5_100)
    delayed = rows_of(options_of(filled, stream="delayed", payload="json"))
    assert len({row["job_id"] for row in delayed}) == len(delayed) == 5_100
    assert delayed[0]["run_at"].timestamp() * 1000 == T0

    spec = RepeatableSpec("tick", RepeatPattern.every(5000), {"a": 1}).stored()
    filled.client.zadd(filled.keys().repeat, {spec.key: T0})
    filled.client.hset(filled.keys().repeat_spec(spec.key), mapping={"spec": encode_spec(spec), "fired": 7})
    (repeat,) = rows_of(options_of(filled, stream="repeat", payload="json"))
    assert (repeat["name"], repeat["pattern"], repeat["fired"]) == ("tick", "every 5000 ms", 7)
    assert repeat["payload"] == '{"a":1}'

    for number in range(30):
        filled.client.set(filled.keys().result(f"job-{number}"), encode_value(number), ex=1000)
    results = rows_of(options_of(filled, stream="results", payload="json"))
    assert sorted(int(row["payload"]) for row in results) == list(range(30))
    assert all(row["expires_at"] is not None for row in results)


def test_a_queue_that_does_not_exist_is_an_error(filled: Filled) -> None:
    for stream in STREAMS:
        with pytest.raises(ConfigError, match="queue 'q' does not exist"):
            rows_of(options_of(filled, stream=stream))
    filled.jobs(1)
    for stream in STREAMS:
        assert len(rows_of(options_of(filled, stream=stream))) == (stream == "jobs")


def test_several_queues_and_bounds(filled: Filled) -> None:
    filled.events(10, "a")
    filled.events(10, "b")
    start, end = '{"a": "5-0"}', '{"a": "7-0", "b": "2-0"}'
    rows = rows_of(options_of(filled, queue="a, b", startingOffsets=start, endingOffsets=end))
    assert [(row["queue"], row["entry_ms"]) for row in rows] == [("a", 6), ("a", 7), ("b", 1), ("b", 2)]
    rows = rows_of(options_of(filled, queue="b", startingTimestamp="9"))
    assert [row["entry_ms"] for row in rows] == [9, 10]


def test_times_limit_a_batch_and_latest_can_be_said_per_queue(filled: Filled) -> None:
    filled.events(10, "a")
    filled.events(10, "b")
    rows = rows_of(options_of(filled, queue="a", startingTimestamp="3", endingTimestamp="5"))
    assert [row["entry_ms"] for row in rows] == [3, 4, 5]
    planner = StreamPlanner(options_of(filled, queue="a,b", streaming=True, startingOffsets='{"a": "latest"}'))
    assert {queue: offset["id"] for queue, offset in planner.initial().items()} == {"a": "10-0", "b": "0-0"}
    planner.close()
    options = ReadOptions.parse({"url": filled.url, "subscribe": "a,b"})
    assert options.queues == ("a", "b")


def test_conditions_limit_what_is_read(filled: Filled) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan, In, LessThanOrEqual, StringContains

    filled.events(10, "a")
    filled.events(10, "b")
    filled.xadd(filled.keys("a").events, "id", "x", "e", "failed", entry_id="11-0")
    reader = PushdownReader(options_of(filled, queue="a,b"))
    conditions = [
        In(("queue",), ("a", "c")),
        GreaterThan(("entry_ms",), 3),
        LessThanOrEqual(("entry_ms",), 11),
        EqualTo(("event",), "failed"),
        StringContains(("reason",), "x"),
    ]
    assert list(reader.pushFilters(conditions)) == conditions  # Spark checks them again
    spans = [partition.value for partition in reader.partitions()]
    assert {span.queue for span in spans} == {"a"}
    assert spans[0].first == EntryId(3, 0)
    rows = [row for partition in reader.partitions() for batch in reader.read(partition) for row in batch.to_pylist()]
    assert [row["entry_id"] for row in rows] == ["11-0"]
    assert list(PushdownReader(options_of(filled)).pushFilters([EqualTo(("queue",), "zzz")])) != []


def test_payloads_can_be_left_out(filled: Filled) -> None:
    filled.letter("a", {"x": 1})
    filled.jobs(2)
    for stream in ("dlq", "jobs"):
        rows = rows_of(options_of(filled, stream=stream, payload="none"))
        assert rows
        assert "payload" not in rows[0]
        assert rows[0]["error"] is None


@pytest.mark.servers
def test_partitions_meet_and_cover_everything_once(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "STEP", 100)
    filled.events(1_050)
    spans = plan_batch(options_of(filled, minPartitions="3"))
    assert sum(span.rows for span in spans) == 1_050
    assert len(spans) >= 3
    for before, after in pairwise(spans):
        assert after.first == before.last.next
    assert len(rows_of(options_of(filled))) == 1_050


def test_there_are_as_many_partitions_as_asked_for(filled: Filled) -> None:
    filled.events(4_500)
    spans = plan_batch(options_of(filled, minPartitions="13"))
    assert len(spans) == 13
    # Within two steps of each other.
    assert max(span.rows for span in spans) - min(span.rows for span in spans) <= 2 * (4_500 // 52)


def test_steps_are_joined_to_partitions_of_about_the_same_size() -> None:
    steps = [Span("q", EntryId(n, 1), EntryId(n + 1, 0), 1_000) for n in range(400)]
    parts = cut(steps, 0)
    assert [part.rows for part in parts] == [50_000] * 8
    assert len(cut(steps, 20)) == 20
    assert len(cut(steps[:1], 0)) == 1
    assert cut([], 5) == []


FEW = [(n * 60_000, 0) for n in range(1, 2_001)]
#: Milliseconds and sequence numbers of 12,000 entries in shapes that streams have.
SHAPES = {
    "one bulk": [(5_000 + n // 200, n % 200) for n in range(12_000)],
    "all day": [(n * 7_200, 0) for n in range(1, 12_001)],
    "a burst each minute": [(60_000 * (1 + n // 600) + n % 600 // 30, n % 30) for n in range(12_000)],
    "few, then a burst": [(n * 60_000, 0) for n in range(1, 2_001)]
    + [(120_001_000 + n // 100, n % 100) for n in range(10_000)],
    "a burst, then few": [(1 + n // 100, n % 100) for n in range(10_000)] + [(n * 60_000, 0) for n in range(1, 2_001)],
    "a burst hidden in the middle": sorted(
        [(n * 60_000, 0) for n in range(1, 2_001)] + [(60_000_123 + n // 100, n % 100) for n in range(10_000)]
    ),
    "ids of somebody's own": [(7, n * n * 10**9) for n in range(1, 12_001)],
    "one millisecond": [(7, n) for n in range(12_000)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_long_streams_are_cut_by_estimates(shape: str, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "WORTH_ESTIMATING", 10_000)
    monkeypatch.setattr(partitions, "ENTRIES_PER_LOOK", 20)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 1_500)
    pipe = filled.client.pipeline(transaction=False)
    for ms, seq in SHAPES[shape]:
        pipe.execute_command("XADD", filled.keys().events, f"{ms}-{seq}", "e", "completed", "id", "x", "ts", 1)
    pipe.execute()
    options = options_of(filled)
    if shape not in ("ids of somebody's own", "one millisecond"):  # which tell nothing
        monkeypatch.delattr(partitions, "walk")
    spans = plan_batch(options)
    sizes = [sum(batch.num_rows for batch in read_span(options, span)) for span in spans]
    assert sum(sizes) == 12_000
    for before, after in pairwise(spans):
        assert after.first == before.last.next
    assert 6 <= len(spans) <= 9
    assert max(sizes) < 1.6 * 1_500, sizes


def test_what_estimates_do_not_explain_is_walked_over(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "WORTH_ESTIMATING", 1_000)
    filled.events(3_000)
    monkeypatch.setattr(partitions, "ENTRIES_PER_LOOK", 3_000)  # one look is not enough
    spans = plan_batch(options_of(filled))
    assert [span.rows for span in spans] == [1_000, 1_000, 1_000]


def test_how_many_entries_lie_between_is_told_as_far_as_it_can_be() -> None:
    extent = Extent(60, EntryId(41, 0), EntryId(100, 0), added=100, max_deleted=EntryId(0, 0))
    start, end = Position(EntryId(0, 0)), Position(EntryId(100, 0))
    assert count_between(start, end, extent) == 60
    assert count_between(Position(EntryId(90, 0), 90), end, extent) == 10
    assert count_between(start, Position(EntryId(50, 0), 50), extent) == 10
    assert count_between(Position(EntryId(90, 0)), end, extent) is None
    assert count_between(start, Position(EntryId(50, 0)), extent) is None
    before_redis_7 = replace(extent, added=None)
    assert count_between(start, end, before_redis_7) == 60
    assert count_between(Position(EntryId(90, 0), 90), end, before_redis_7) is None
    assert count_between(start, end, replace(extent, first=None)) == 0
    assert count_between(Position(EntryId(90, 0), 900), end, extent) is None  # the counter was reset


# --- following


def test_a_query_follows_in_limited_steps_over_all_queues(filled: Filled) -> None:
    filled.events(100, "a")
    filled.events(10, "b")
    planner = StreamPlanner(options := options_of(filled, queue="a,b", streaming=True))
    offset = planner.initial()
    sizes = []
    for _ in range(5):
        end = planner.latest(offset, 40)
        sizes.append(count_rows(options, planner.plan(offset, end)))
        offset = end
    planner.close()
    assert sizes == [40, 40, 30, 0, 0]
    assert offset["a"] == {"id": "100-0", "added": 100, "cuts": []}


def test_a_replayed_micro_batch_has_the_same_partitions(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "WORTH_ESTIMATING", 1_000)
    monkeypatch.setattr(partitions, "ENTRIES_PER_LOOK", 20)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 300)
    monkeypatch.setattr(partitions, "STEP", 100)
    filled.events(3_000)
    options = options_of(filled, streaming=True, failOnDataLoss="false")
    plans: list[list[Span]] = []
    start = end = {}
    for trimmed_to in (3_000, 3_000, 1_500):  # the first run, the run after a crash, and one after a trim
        filled.client.xtrim(filled.keys().events, maxlen=trimmed_to, approximate=False)
        planner = StreamPlanner(options)
        if not plans:
            start = planner.initial()
            end = planner.latest(start, 2_500)
        plans.append(planner.plan(start, end))
        planner.close()
    assert len(plans[0]) == 9
    assert plans[0] == plans[1] == plans[2]


def test_an_offset_without_news_stays_as_it_was(filled: Filled) -> None:
    filled.events(10)
    planner = StreamPlanner(options_of(filled, streaming=True, minPartitions="3"))
    end = planner.latest(planner.initial(), 10)
    assert end["q"]["cuts"]
    assert planner.latest(end, 10) == end  # Spark would run a micro-batch for any difference
    planner.close()


def test_queues_that_are_not_read_now_keep_their_offsets(filled: Filled) -> None:
    filled.events(5, "a")
    filled.events(5, "b")
    offset: Any = None
    read = []
    for queue in ("a", "b", "a"):
        planner = StreamPlanner(options := options_of(filled, queue=queue, streaming=True))
        start = offset or planner.initial()
        offset = planner.latest(start, None)
        read.append(count_rows(options, planner.plan(start, offset)))
        planner.close()
    assert read == [5, 5, 0]


def test_a_queue_added_to_a_checkpointed_query_respects_the_limit(filled: Filled) -> None:
    filled.events(10, "a")
    filled.events(100, "b")
    planner = StreamPlanner(options := options_of(filled, queue="a,b", streaming=True))
    start = {"a": {"id": "10-0", "added": 10}}
    assert count_rows(options, planner.plan(start, planner.latest(start, 30))) == 30
    planner.close()


def test_the_limit_holds_whatever_was_deleted_behind_it(filled: Filled) -> None:
    for number in range(300):
        filled.letter(f"j{number}", number)
    planner = StreamPlanner(options := options_of(filled, stream="dlq", streaming=True))
    start = planner.initial()
    planner.stop_at_now()
    later = [filled.letter(f"later{number}", number) for number in range(280)]
    filled.client.xdel(filled.keys().dlq, *later)
    sizes = []
    for _ in range(4):
        end = planner.latest(start, 100)
        sizes.append(count_rows(options, planner.plan(start, end)))
        start = end
    planner.close()
    assert sizes == [100, 100, 100, 0]


def test_under_available_now_nothing_newer_is_read(filled: Filled) -> None:
    filled.events(5)
    planner = StreamPlanner(options_of(filled, streaming=True))
    start = planner.initial()
    planner.stop_at_now()
    filled.events(5, start=6)
    assert planner.latest(start, None)["q"]["id"] == "5-0"
    assert planner.newest()["q"]["id"] == "10-0"
    planner.close()


def test_latest_starts_behind_what_is_there(filled: Filled) -> None:
    filled.events(5)
    planner = StreamPlanner(options := options_of(filled, streaming=True, startingOffsets="latest"))
    start = planner.initial()
    filled.events(2, start=6)
    assert count_rows(options, planner.plan(start, planner.latest(start, None))) == 2
    planner.close()


@pytest.mark.servers("valkey", "redis70", "redis86")
def test_a_trimmed_stream_is_an_error_that_names_and_counts_the_gap(filled: Filled) -> None:
    filled.events(10)
    planner = StreamPlanner(options_of(filled, streaming=True))
    offset = planner.latest(planner.initial(), 4)
    filled.client.xtrim(filled.keys().events, maxlen=3, approximate=False)
    end = planner.latest(offset, None)
    with pytest.raises(DataLossError, match=r"3 entries were trimmed.*after 4-0, the first entry present is 8-0"):
        planner.plan(offset, end)
    planner.close()


def test_with_data_loss_allowed_the_gap_is_a_warning(filled: Filled, caplog: pytest.LogCaptureFixture) -> None:
    filled.events(10)
    planner = StreamPlanner(options := options_of(filled, streaming=True, failOnDataLoss="false"))
    offset = planner.latest(planner.initial(), 4)
    filled.client.xtrim(filled.keys().events, maxlen=3, approximate=False)
    with caplog.at_level(logging.WARNING, "tampu.spark"):
        spans = planner.plan(offset, planner.latest(offset, None))
    planner.close()
    assert count_rows(options, spans) == 3
    assert "3 entries were trimmed" in caplog.text


def test_a_stream_trimmed_exactly_to_what_was_read_is_no_gap(filled: Filled) -> None:
    filled.events(10)
    planner = StreamPlanner(options := options_of(filled, streaming=True))
    offset = planner.latest(planner.initial(), 7)
    filled.client.xtrim(filled.keys().events, maxlen=3, approximate=False)
    assert count_rows(options, planner.plan(offset, planner.latest(offset, None))) == 3
    planner.close()


@pytest.mark.servers("valkey", "redis70", "redis86")
def test_a_trim_is_seen_although_a_later_event_was_deleted(filled: Filled) -> None:
    filled.events(10)
    planner = StreamPlanner(options_of(filled, streaming=True))
    offset = planner.latest(planner.initial(), 4)
    filled.client.xdel(filled.keys().events, "9-0")
    filled.client.xtrim(filled.keys().events, maxlen=3, approximate=False)
    with pytest.raises(DataLossError, match="3 entries were trimmed or deleted"):
        planner.plan(offset, planner.latest(offset, None))
    planner.close()


@pytest.mark.servers("valkey", "redis62", "redis86")
@pytest.mark.parametrize(("start", "count"), [(1, 30), (5_000, 30), (5_000, 150)])
def test_a_stream_that_was_created_again_is_an_error(filled: Filled, start: int, count: int) -> None:
    filled.events(100)
    planner = StreamPlanner(options_of(filled, streaming=True))
    offset = planner.latest(planner.initial(), None)
    filled.client.delete(filled.keys().events)
    assert planner.latest(offset, None) == offset  # a key that is missing may come back
    filled.events(count, start=start)
    filled.client.xtrim(filled.keys().events, maxlen=count - 10, approximate=False)
    if start == 1 or offset["q"].get("added"):  # Redis 6.2 does not count, so higher IDs tell nothing
        with pytest.raises(DataLossError, match="deleted and created again"):
            planner.plan(offset, planner.latest(offset, None))
    planner.close()


@pytest.mark.parametrize("start", [1, 5_000])
def test_with_data_loss_allowed_a_new_stream_is_read_from_its_start(filled: Filled, start: int) -> None:
    filled.events(100)
    planner = StreamPlanner(options := options_of(filled, streaming=True, failOnDataLoss="false"))
    offset = planner.latest(planner.initial(), None)
    filled.client.delete(filled.keys().events)
    filled.events(30, start=start)
    end = planner.latest(offset, None)
    assert count_rows(options, planner.plan(offset, end)) == 30
    assert planner.latest(end, None) == end
    assert (end["q"]["added"], end["q"]["former"]) == (30, 100)
    first = planner.latest(offset, 20)
    assert (first["q"]["added"], first["q"]["former"]) == (20, 100)
    assert planner.latest(first, 20)["q"] == end["q"]
    planner.close()


def test_letters_that_were_replayed_are_no_gap(filled: Filled) -> None:
    ids = [filled.letter(f"j{number}", number) for number in range(6)]
    planner = StreamPlanner(options := options_of(filled, stream="dlq", streaming=True))
    offset = planner.latest(planner.initial(), 2)
    filled.client.xdel(filled.keys().dlq, *ids[:4])
    assert count_rows(options, planner.plan(offset, planner.latest(offset, None))) == 2
    planner.close()


def test_a_batch_from_an_id_that_was_trimmed_is_an_error(filled: Filled) -> None:
    filled.events(10)
    filled.client.xtrim(filled.keys().events, maxlen=3, approximate=False)
    with pytest.raises(DataLossError, match="first entry present is 8-0"):
        plan_batch(options_of(filled, startingOffsets='{"q": "2-0"}'))
    assert len(rows_of(options_of(filled))) == 3


def test_pages_are_limited_by_bytes(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tampu.spark.server.PAGE_BYTES", 40_000)
    monkeypatch.setattr(readers, "BATCH_BYTES", 100_000)
    for number in range(40):
        filled.letter(f"small-{number}", number)
    for number in range(60):
        filled.letter(f"large-{number}", "x" * 10_000)
    options = options_of(filled, stream="dlq")
    (span,) = plan_batch(options)
    with QueueServer(filled.url, "q") as server:
        counts = [len(page) for page, _ in span_pages(server, server.keys.dlq, span)]
    assert sum(counts) == 100
    assert counts[:2] == [16, 32]  # pages grow slowly, as larger entries may follow
    assert set(counts[2:-1]) == {3}  # four entries of more than 10,000 bytes do not fit
    batches = list(read_span(options, span))
    assert max(batch.num_rows for batch in batches[1:]) == 12
    assert sum(batch.num_rows for batch in batches) == 100


@pytest.mark.parametrize("stream", ["delayed", "results"])
def test_snapshots_are_limited_by_bytes(stream: str, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tampu.spark.server.PAGE_BYTES", 40_000)
    monkeypatch.setattr(readers, "BATCH_BYTES", 100_000)
    for number in range(100):
        packed = encode_slot("x" * 10_000)
        member = encode_delayed_member("later", encode_envelope(f"later-{number:03}", packed, number))
        filled.client.zadd(filled.keys().delayed, {member: number // 7})
        filled.client.set(filled.keys().result(f"later-{number:03}"), encode_value("x" * 10_000))
    options = options_of(filled, stream=stream)
    found = list(read_snapshot(options, "q"))
    assert sorted(job_id for batch in found for job_id in batch["job_id"].to_pylist()) == [
        f"later-{number:03}" for number in range(100)
    ]
    assert max(batch.num_rows for batch in found) <= 16
    with QueueServer(filled.url, "q") as server:
        counts = [len(page) for page, _ in readers._SNAPSHOTS[stream][0](server)]
    assert counts[0] == 16
    assert set(counts[1:-1]) == {3}


def test_the_delayed_jobs_of_a_check_are_read_in_pages_of_bytes(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tampu.spark.server.PAGE_BYTES", 40_000)
    for number in range(100):
        member = encode_delayed_member("later", encode_envelope(f"later-{number}", encode_slot("x" * 10_000), number))
        filled.client.zadd(filled.keys().delayed, {member: number})
    sizes: list[int] = []
    call = QueueServer.call

    def counted(self: QueueServer, *parts: Any, **options: Any) -> Any:
        reply = call(self, *parts, **options)
        if parts[0] == "ZSCAN":
            sizes.append(len(reply[1]) // 2)
        return reply

    monkeypatch.setattr(QueueServer, "call", counted)
    assert check_queue(filled.url, "q", Contracts.of({"later": {"n": {}}}))[0] >= 100
    assert len(sizes) > 10, sizes


def test_a_server_with_tls_and_a_password(fresh_server: Any) -> None:
    filled = Filled(fresh_server("redis86", tls=True, requirepass="s3cret"))
    filled.jobs(3)
    assert len(rows_of(options_of(filled, stream="jobs"))) == 3


def test_an_unreachable_server_is_said() -> None:
    with QueueServer("redis://127.0.0.1:1", "q") as server, pytest.raises(Exception, match=r"127\.0\.0\.1:1"):
        server.call("PING", patience_secs=0.2)


def test_batches_are_arrow(filled: Filled) -> None:
    filled.events(1)
    options = options_of(filled)
    (span,) = plan_batch(options)
    (batch,) = read_span(options, span)
    assert isinstance(batch, pa.RecordBatch)


def test_the_garbage_collector_rests_while_batches_are_made_and_only_then() -> None:
    def batches() -> Iterator[bool]:
        for _ in range(3):
            yield gc.isenabled()

    seen = [(was_enabled, gc.isenabled()) for was_enabled in made_with_gc_paused(batches())]
    assert seen == [(False, True)] * 3
    with pytest.raises(ZeroDivisionError), gc_paused():
        raise ZeroDivisionError(gc.isenabled())
    assert gc.isenabled()


# --- options of Kafka's source


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def pattern_options(filled: Filled, pattern: str, *, streaming: bool = False, **options: str) -> ReadOptions:
    given = {"url": filled.url, "subscribePattern": pattern} | options
    return ReadOptions.parse(given, streaming=streaming)


def test_a_pattern_reads_all_queues_that_match(filled: Filled) -> None:
    for queue, count in (("mail.eu", 3), ("mail.us", 2), ("orders", 7)):
        filled.events(count, queue)
    filled.delayed(4, "mail.us")
    filled.client.set("{chasqui:mail.x}:result:1", "not a queue")
    rows = rows_of(pattern_options(filled, r"mail\..*"))
    assert sorted(row["queue"] for row in rows) == ["mail.eu"] * 3 + ["mail.us"] * 2
    delayed = pattern_options(filled, "mail.*", stream="delayed")
    assert [part.value for part in BatchReader(delayed).partitions()] == ["mail.eu", "mail.us"]
    assert rows_of(pattern_options(filled, "mail")) == []  # all of the name has to match


def test_a_stream_finds_queues_that_are_created_later(filled: Filled) -> None:
    filled.events(5, "mail-1")
    clock = Clock()
    options = pattern_options(filled, "mail-.*", streaming=True, startingOffsets="latest")
    planner = StreamPlanner(options, monotonic=clock)
    start = planner.initial()
    filled.events(4, "mail-2")
    assert planner.latest(start, None) == start
    clock.now += FIND_QUEUES_EVERY_SECS
    end = planner.latest(start, None)
    spans = planner.plan(start, end)
    assert {span.queue for span in spans} == {"mail-2"}
    assert count_rows(options, spans) == 4  # `latest` is for queues that were there when the query started
    planner.close()
    # A restart plans the same from the checkpoint, even if a queue is gone meanwhile.
    filled.client.delete(filled.keys("mail-1").events)
    again = StreamPlanner(options)
    assert again.plan(start, end) == spans
    again.close()


def test_a_micro_batch_waits_for_enough_entries_but_not_for_ever(filled: Filled) -> None:
    clock = Clock()
    options = options_of(filled, streaming=True, minOffsetsPerTrigger="10", maxTriggerDelay="60s")
    planner = StreamPlanner(options, monotonic=clock)
    start = planner.initial()
    filled.events(9)
    assert planner.latest(start, None) == start
    filled.events(1, start=10)
    end = planner.latest(start, None)
    assert end["q"]["id"] == "10-0"
    filled.events(1, start=11)
    clock.now += 59
    assert planner.latest(end, None) == end
    clock.now += 1
    assert planner.latest(end, None)["q"]["id"] == "11-0"
    filled.events(1, start=12)
    planner.stop_at_now()  # with availableNow all is read at once
    assert planner.latest(end, None)["q"]["id"] == "12-0"
    planner.close()


@pytest.mark.skipif(not readers.HAS_ADMISSION_CONTROL, reason="needs PySpark 4.2")
def test_offsets_may_arrive_as_text(filled: Filled) -> None:
    filled.events(3)
    reader = readers.LimitedStreamReader(options_of(filled, streaming=True))
    start = json.dumps(reader.initialOffset())
    everything: Any = vars(readers)["ReadAllAvailable"]()
    end = json.dumps(reader.latestOffset(start, everything))  # type: ignore[arg-type]
    assert len(reader.partitions(start, end)) == 1  # type: ignore[arg-type]
    reader.stop()
