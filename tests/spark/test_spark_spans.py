"""Which files hold rows of the minutes that changed. Needs no Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from tampu.spark.lake.incremental import (
    holds_jobs_in,
    holds_only_rows_in,
    holds_rows_in,
    is_job_in,
    is_row_in,
    joined,
    minute_of,
)
from tampu.spark.lake.table import File

if TYPE_CHECKING:
    from tampu.spark.lake.incremental import Spans

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = ("q", "2026-03-01")


def minutes(first: int, last: int) -> tuple[datetime, datetime]:
    return NOON + timedelta(minutes=first), NOON + timedelta(minutes=last)


def file(lowest: dict[str, Any], highest: dict[str, Any], nulls: dict[str, int] | None = None) -> File:
    return File("path", DAY, 10, 1000, lowest, highest, nulls or {})


def gold_file(first: int, last: int) -> File:
    low, high = minutes(first, last)
    return file({"minute": low}, {"minute": high})


def silver_file(first: datetime, last: datetime) -> File:
    return file({"first_ended_at": first}, {"done_at": last}, {"last_failed_at": 10})


@pytest.mark.parametrize(
    ("of_file", "span", "holds", "holds_only"),
    [
        ((0, 5), (2, 3), True, False),
        ((2, 3), (0, 5), True, True),
        ((0, 5), (0, 5), True, True),
        ((0, 5), (5, 9), True, False),
        ((0, 5), (6, 9), False, False),
        ((6, 9), (0, 5), False, False),
    ],
)
def test_a_file_of_gold_holds_the_minutes_between_its_first_and_its_last(
    of_file: tuple[int, int], span: tuple[int, int], holds: bool, holds_only: bool
) -> None:
    assert holds_rows_in(gold_file(*of_file), minutes(*span)) is holds
    assert holds_only_rows_in(gold_file(*of_file), minutes(*span)) is holds_only


def test_a_file_without_statistics_may_hold_all_minutes() -> None:
    assert holds_rows_in(file({}, {}), minutes(0, 1))
    assert not holds_only_rows_in(file({}, {}), minutes(0, 1))
    assert holds_jobs_in(file({}, {}), {DAY: minutes(0, 1)})
    assert not holds_jobs_in(file({}, {}), {("other", DAY[1]): None})


def test_a_whole_day_includes_every_file_of_it() -> None:
    assert holds_rows_in(gold_file(0, 5), None)
    assert holds_only_rows_in(gold_file(0, 5), None)
    last_moment = NOON.replace(hour=23, minute=59, second=59, microsecond=999_000)
    assert holds_jobs_in(silver_file(last_moment, last_moment), {DAY: None})
    next_day = last_moment + timedelta(milliseconds=1)
    assert not holds_jobs_in(silver_file(next_day, next_day), {DAY: None})


def test_a_job_that_ends_within_the_last_minute_counts() -> None:
    for seconds, holds in ((-1, False), (0, True), (59, True), (119, True), (120, False)):
        moment = NOON + timedelta(seconds=seconds)
        assert holds_jobs_in(silver_file(moment, moment), {DAY: minutes(0, 1)}) is holds


def test_spans_of_one_day_are_joined() -> None:
    assert joined(minutes(0, 1), minutes(5, 6)) == minutes(0, 6)
    assert joined(minutes(3, 4), minutes(1, 9)) == minutes(1, 9)


def test_minutes_are_minutes_of_utc() -> None:
    assert minute_of(datetime(2026, 3, 1, 12, 0, 59, 999)) == NOON
    east = timezone(timedelta(hours=5, minutes=30))
    assert minute_of(datetime(2026, 3, 1, 17, 30, 1, tzinfo=east)) == NOON
    assert minute_of(datetime(1, 1, 1, tzinfo=UTC)).year == 1


def test_conditions_hold_no_times_that_spark_would_compile() -> None:
    spans: Spans = {DAY: minutes(0, 1), ("it's", "0001-01-01"): (datetime(1, 1, 1, tzinfo=UTC),) * 2}
    for condition in (is_row_in(spans), is_job_in(spans)):
        assert "TIMESTAMP '" not in condition
        assert "concat('0001-01-01 00:00:00', coalesce(left(name, 0), ''))" in condition
        assert "queue = 'it\\'s'" in condition
    assert "2026-03-01 00:00:00" in is_job_in({DAY: None})
    assert "2026-03-01 23:59:00" in is_job_in({DAY: None})
    assert is_row_in({DAY: None, ("q", "2026-02-28"): None}) == "(queue = 'q' AND day IN ('2026-02-28', '2026-03-01'))"
