"""Which minutes of which days changed, so that gold computes those and keeps the others. Needs no Spark."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING

from tampu.spark.lake.silver import literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tampu.spark.lake.table import File, Partition

    #: The first and the last minute, in UTC.
    Minutes = tuple[datetime, datetime]
    #: The minutes of a partition that changed; None for all of them.
    Span = Minutes | None
    #: Spans by partition: a queue and, in most tables, a day.
    Spans = Mapping[Partition, Span]

#: Maximum number of days for which gold computes single minutes; of more days, it computes all minutes.
MAX_SPANS = 50
#: Most days that are listed for one file; a single wrong clock can make a file span 8,000 years.
MAX_DAYS = 3_660


def minute_of(moment: datetime) -> datetime:
    """Return the start of the minute, in UTC."""
    return _in_utc(moment).replace(second=0, microsecond=0)


def joined(one: Minutes, other: Minutes) -> Minutes:
    """Return the minutes from the first to the last of both."""
    return min(one[0], other[0]), max(one[1], other[1])


def is_row_in(spans: Spans) -> str:
    """Return a condition on rows of gold with a queue, a day and a minute."""
    conditions = []
    whole: dict[str, list[str]] = {}
    for (queue, day), span in spans.items():
        if span is None:
            whole.setdefault(queue, []).append(day)
        else:
            minutes = f"minute BETWEEN {_timestamp(span[0])} AND {_timestamp(span[1])}"
            conditions.append(f"queue = {literal(queue)} AND day = {literal(day)} AND {minutes}")
    for queue, days in whole.items():
        conditions.append(f"queue = {literal(queue)} AND day IN ({', '.join(map(literal, sorted(days)))})")
    return " OR ".join(f"({condition})" for condition in conditions)


def is_job_in(spans: Spans) -> str:
    """Return a condition that holds for all jobs of silver which ended or failed in the spans, and for few others."""
    by_queue: dict[str, tuple[datetime, datetime]] = {}
    for (queue, day), span in spans.items():
        span = _whole(day) if span is None else span
        by_queue[queue] = joined(by_queue.get(queue, span), span)
    conditions: list[str] = []
    for queue, (first, last) in by_queue.items():
        # The last minute may not be over: the minute of a time is compared.
        conditions += (
            f"(queue = {literal(queue)} AND {high} >= {_timestamp(first)} AND "
            f"date_trunc('MINUTE', {low}) <= {_timestamp(last)})"
            for low, high in (("first_ended_at", "done_at"), ("first_failed_at", "last_failed_at"))
        )
    return " OR ".join(conditions)


def holds_jobs_in(file: File, spans: Spans) -> bool:
    """Return whether jobs of a silver file may have ended or failed in the spans."""
    runs = _runs(file)
    for (queue, day), span in spans.items():
        if queue == file.partition[0]:
            first, last = _whole(day) if span is None else span
            if runs is None or any(end >= first and minute_of(begin) <= last for begin, end in runs):
                return True
    return False


def holds_rows_in(file: File, span: Span) -> bool:
    """Return whether a file of gold may have rows of these minutes."""
    minutes = _minutes(file)
    return span is None or minutes is None or (minutes[0] <= span[1] and minutes[1] >= span[0])


def holds_only_rows_in(file: File, span: Span) -> bool:
    """Return whether a file of gold has no rows of other minutes."""
    minutes = _minutes(file)
    return span is None or (minutes is not None and span[0] <= minutes[0] and minutes[1] <= span[1])


def days_of_file(file: File) -> set[str] | None:
    """Return the days from the first to the last end, and failure, of a silver file's jobs.

    None if it does not say, or if there are too many: then all days are computed.
    """
    runs = _runs(file)
    if runs is None or any((last - first).days > MAX_DAYS for first, last in runs):
        return None
    return {
        (first.date() + timedelta(days=number)).isoformat()
        for first, last in runs
        for number in range((last.date() - first.date()).days + 1)
    }


def _runs(file: File) -> list[tuple[datetime, datetime]] | None:
    """Return the first and last end, and the first and last failure, of a silver file; None if they are not known."""
    found: list[tuple[datetime, datetime]] = []
    for first, last in (("first_ended_at", "done_at"), ("first_failed_at", "last_failed_at")):
        low, high = file.lowest.get(first), file.highest.get(last)
        if isinstance(low, datetime) and isinstance(high, datetime):
            found.append((_in_utc(low), _in_utc(high)))
        elif file.nulls.get(last) != file.rows:
            return None
    return found


def _minutes(file: File) -> Minutes | None:
    low, high = file.lowest.get("minute"), file.highest.get("minute")
    return (_in_utc(low), _in_utc(high)) if isinstance(low, datetime) and isinstance(high, datetime) else None


def _whole(day: str) -> Minutes:
    midnight = datetime.combine(date.fromisoformat(day), time(), UTC)
    return midnight, midnight.replace(hour=23, minute=59)


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _timestamp(moment: datetime) -> str:
    # Spark compiles numbers and times of a query into its code, and would compile it again for every minute. Text is
    # passed to the code, unless the optimizer can make a time of it: hence the empty start of a column.
    text = moment.replace(tzinfo=None).isoformat(sep=" ")
    return f"CAST(concat('{text}', coalesce(left(name, 0), '')) AS TIMESTAMP)"
