"""Options are checked before anything starts, and an error names the option."""

from __future__ import annotations

import pytest

from tampu.errors import ConfigError
from tampu.spark.options import ReadOptions, WriteOptions, parse_duration
from tampu.spark.read.offsets import EntryId, parse_entry_id

URL = "redis://127.0.0.1:6379"


def read(streaming: bool | None = False, **options: str) -> ReadOptions:
    return ReadOptions.parse({"url": URL, "queue": "q"} | options, streaming=streaming)


def write(**options: str) -> WriteOptions:
    return WriteOptions.parse({"url": URL, "queue": "q"} | options)


def test_defaults_are_those_of_kafka_where_it_has_them() -> None:
    options = read()
    assert (options.stream, options.payload, options.starting) == ("events", "binary", "earliest")
    assert options.fail_on_data_loss


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"streem": "dlq"}, "streem"),
        ({"stream": "nope"}, "stream"),
        ({"queue": ""}, "queue"),
        ({"queue": "a,a"}, "queue"),
        ({"queue": "a{b"}, "queue"),
        ({"payload": "xml"}, "payload"),
        ({"startingOffsets": "soon"}, "startingOffsets"),
        ({"startingOffsets": '{"other": "1-0"}'}, "startingOffsets"),
        ({"startingOffsets": '{"q": "x"}'}, "startingOffsets"),
        ({"startingOffsets": "latest"}, "startingOffsets"),
        ({"endingOffsets": "earliest"}, "endingOffsets"),
        ({"startingTimestamp": "soon"}, "startingTimestamp"),
        ({"startingTimestamp": "1", "startingOffsets": "earliest"}, "startingTimestamp"),
        ({"minPartitions": "0"}, "minPartitions"),
        ({"subscribe": "a"}, "subscribe"),
        ({"endingTimestamp": "soon"}, "endingTimestamp"),
        ({"endingTimestamp": "1", "endingOffsets": "latest"}, "endingTimestamp"),
        ({"pushdown": "maybe"}, "pushdown"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger is for spark.readStream"),
        ({"subscribePattern": "q.*"}, "cannot be combined"),
        ({"stream": "delayed", "minPartitions": "2"}, "minPartitions"),
        ({"path": "x"}, "path"),
        ({"dedupe": "chunk"}, "dedupe"),
        ({"url": "embedded://"}, "url"),
        ({"url": "http://x"}, "url"),
    ],
)
def test_a_wrong_read_option_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**options)


def test_a_limit_that_leaves_nothing_for_some_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match="maxOffsetsPerTrigger=2 is shared by 3 queues"):
        read(streaming=True, queue="a,b,c", maxOffsetsPerTrigger="2")


@pytest.mark.parametrize("stream", ["jobs", "delayed", "repeat", "results"])
def test_a_snapshot_cannot_be_followed(stream: str) -> None:
    with pytest.raises(ConfigError, match=f"stream={stream} can only be read as a snapshot"):
        read(streaming=True, stream=stream)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": "events"}, "stream"),
        ({"dedupe": "yes"}, "dedupe"),
        ({"queue": "a,b"}, "queue"),
        ({"spread": "long"}, "spread"),
        ({"maxWaiting": "-1"}, "maxWaiting"),
        ({"stream": "dlq", "spread": "1h"}, "spread"),
        ({"minPartitions": "3"}, "minPartitions"),
        ({"nonsense": "1"}, "nonsense"),
    ],
)
def test_a_wrong_write_option_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        write(**options)


def test_write_options_are_read() -> None:
    options = write(spread="6h", maxWaiting="50000", dedupe="jobid", checkpointLocation="/x")
    assert (options.spread_ms, options.max_waiting, options.dedupe) == (21_600_000, 50_000, "jobid")


def test_durations() -> None:
    assert [parse_duration(text, "x") for text in ("250ms", "10s", "5m", "6h", "7d", "3")] == [
        *(0.25, 10, 300, 21600, 604800, 3)
    ]


def test_ids_are_ordered_and_have_neighbours() -> None:
    assert parse_entry_id("5-3").next == EntryId(5, 4)
    assert parse_entry_id(b"5").previous == EntryId(4, 2**64 - 1)
    assert EntryId(9, 0) < EntryId(10, 0) < EntryId(2**64 - 1, 2**64 - 1)
    assert EntryId(1, 2**64 - 1).next == EntryId(2, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"queue": "q", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "must not exceed"),
        ({"queue": "q", "maxTriggerDelay": "5s"}, "minOffsetsPerTrigger"),
        ({"queue": "q", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"subscribePattern": "("}, "regular expression"),
    ],
)
def test_wrong_options_of_a_stream_are_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ReadOptions.parse({"url": URL} | options, streaming=True)


def test_a_pattern_is_refused_on_a_cluster() -> None:
    from tampu.spark.server import check_can_scan

    check_can_scan(URL)
    with pytest.raises(ConfigError, match="subscribePattern does not work with a Cluster"):
        check_can_scan("redis+cluster://127.0.0.1:7000")
