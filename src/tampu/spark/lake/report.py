"""`tampu pipeline report`: the gold tables as one self-contained HTML page. Needs no Spark.

DataFusion sums the tables up, so that memory does not grow with the history.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tampu.spark.lake.charts import TIME_STEPS, Bar, Series, bar_chart, line_chart
from tampu.spark.lake.rows import open_table, published, query_table, sql_text
from tampu.spark.lake.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tampu.spark.lake.folder import LakeVersion

    Rows = list[dict[str, Any]]
    Points = list[tuple[float, float | None]]

#: Most rows of a table, and bars of a plot.
MAX_ROWS = 12
#: Maximum number of points in a line over time.
BUCKETS = 90
#: Buckets that the forecast looks back, and ahead.
FORECAST_BUCKETS = 15
#: Percentiles of latencies, as in `gold/latency`.
PERCENTILES = (50, 95, 99)
#: Outcomes of ended jobs, as columns of `gold/throughput`.
OUTCOMES = ("completed", "dead", "cancelled")
#: Columns of the table of dead letters.
_CLUSTERS = ("cluster", "queue", "name", "letters", "still dead", "reason", "error")
NONE = '<p class="empty">none</p>'
#: Table to the column that says when something happened.
TIMES = {
    **dict.fromkeys(("gold/throughput", "gold/latency", "gold/failures"), "minute"),
    **dict.fromkeys(("gold/slo", "gold/undecodable"), "day"),
    "gold/ends": "ended_at",
    "gold/dlq_clusters": "last_seen",
    "gold/repairs": "repaired_at",
}

STYLE = """
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#5b6470;--paper:#fff;--line:#e3e7ec;--card:#f6f8fa;--hit:#8b98a81f;
  --s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#cc79a7;--s4:#e69f00;--s5:#56b4e9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--paper:#14171a;--line:#2b3138;--card:#1c2126;
  --hit:#9aa4b026;--s0:#4aa8e0;--s1:#f08a3c;--s2:#2fc896;--s3:#e39cc6;--s4:#f0b83f;--s5:#8fd0f5}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
  max-width:960px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}h2{font-size:18px;margin:40px 0 4px}
.sub{color:var(--soft);margin:2px 0 20px;font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.tile b{display:block;font-size:24px;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
figure{margin:12px 0 0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px 12px}
figcaption{font-weight:600;margin-bottom:6px}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}.grid{stroke:var(--line)}
.empty{color:var(--soft);margin:0}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}
.line{stroke:var(--c)}.area,.dot{fill:var(--c)}.bar{fill:var(--s1)}
.hit:hover{fill:var(--hit)}
.legend{display:flex;gap:18px;flex-wrap:wrap;font-size:13px;color:var(--soft);padding-left:64px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.legend i{background:var(--c)!important}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
td,th{text-align:left;padding:6px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}code{font-size:12px;word-break:break-word}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:4px 8px;
  margin-top:12px}
.warn{background:#d55e0022;border:1px solid #d55e00;border-radius:8px;padding:8px 12px;margin:12px 0}
"""


@dataclass(frozen=True)
class Forecast:
    """The backlog if the rates of the last minutes continue."""

    sentence: str
    points: Points


@dataclass(frozen=True)
class Figures:
    """The published tables of a lake; only some queues, and only what happened since a time, if these are given."""

    lake: Store | Path
    state: LakeVersion
    queues: Sequence[str] = ()
    since: datetime | None = None

    def rows(self, name: str, columns: str, rest: str = "") -> Rows:
        """Run `SELECT columns` over one table; no rows if it does not exist."""
        table = open_table(self.lake, name, self.state)
        if table is None:
            return []
        conditions = ["true"]
        if self.queues:
            conditions.append(f"queue IN ({', '.join(map(sql_text, self.queues))})")
        if self.since is not None and name in TIMES:
            since = self.since.date().isoformat() if TIMES[name] == "day" else self.since.isoformat()
            conditions.append(f"{TIMES[name]} >= {sql_text(since)}")
        text = f"SELECT {columns} FROM rows WHERE {' AND '.join(conditions)} {rest}"  # noqa: S608 - our own columns
        found: Rows = query_table(table, text).to_pylist()
        return found


def write_report(
    lake: str | Path | Store,
    output: str | Path,
    *,
    queues: Sequence[str] = (),
    since: timedelta | None = None,
    now: datetime | None = None,
) -> Path:
    """Write the page, for what happened within `since` before now; `ConfigError` if the folder is not a lake."""
    now, target = now or datetime.now(UTC), Path(output)
    figures = Figures(Store.of(lake), published(lake), queues, None if since is None else now - since)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = render(figures, now)
    # It shows names and errors of jobs: only this user may read it, unless the file exists already.
    with open(target, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(page)
    return target


def render(figures: Figures, now: datetime) -> str:
    """Return the page as text."""
    bucket_secs, ended, latency = _over_time(figures)
    per = _unit(bucket_secs)
    backlog, forecast = backlog_of(figures, bucket_secs)
    names = {
        row["queue"]
        for name in ("throughput", "dlq_clusters")
        for row in figures.rows(f"gold/{name}", "DISTINCT queue")
    }
    title = escape(", ".join(sorted(names)))
    since = "" if figures.since is None else f", since {figures.since:%Y-%m-%d %H:%M}"
    waits, runs = (
        [Series(f"p{share}", _points(latency, f"{what}_p{share}_ms", bucket_secs)) for share in PERCENTILES]
        for what in ("wait", "run")
    )
    rates = [
        Series(name, [(at, (count or 0) * (1 if per == "second" else 60) / bucket_secs) for at, count in points])
        for name, points in ((name, _points(ended, name, bucket_secs)) for name in OUTCOMES)
    ]
    predicted = [Series("at the current rates", forecast.points, dashed=True)] if forecast.points else []
    body = [
        f"<h1>{title or 'no jobs yet'}</h1>",
        f'<p class="sub">tampu, {now:%Y-%m-%d %H:%M} UTC{since}, round {figures.state.round} of the lake '
        f"<code>{escape(str(figures.lake))}</code></p>",
        _warning(figures),
        _tiles(figures),
        "<h2>Throughput</h2>",
        line_chart(f"Ended jobs per {per}", "jobs/s" if per == "second" else "jobs/min", rates).figure(),
        "<h2>Latency</h2>",
        line_chart("Wait for a worker", "ms", waits, log=True).figure(),
        line_chart("Run time", "ms", runs, log=True).figure(),
        "<h2>Backlog</h2>",
        f"<p>{escape(forecast.sentence)}</p>",
        line_chart(
            "Jobs created and not ended, by their events", "jobs", [Series("backlog", backlog), *predicted]
        ).figure(),
        "<h2>Failures</h2>",
        bar_chart("Failed runs by error", _top(figures, "fingerprint", "(no text)")).figure(),
        bar_chart("Failed runs by name", _top(figures, "name", "(no name)")).figure(),
        *(f"<h2>{heading}</h2>{table}" for heading, table in _tables(figures) if table),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing in it may run or load anything, even if a text from a queue were not escaped.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'\">"
        # An empty icon: browsers request one, and a file cannot serve it.
        '<link rel="icon" href="data:,">'
        f"<title>tampu: {title}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


# --- over time


def _over_time(figures: Figures) -> tuple[float, Rows, Rows]:
    """Return the length of a bucket in seconds, the ends of jobs and their latencies; rows have a column `bucket`."""
    span_secs = _span_secs(figures, "gold/throughput") or 0.0
    bucket_secs = max(bucket_of(span_secs + 60), 60)
    if span_secs < 60 * BUCKETS and (exact_secs := _span_secs(figures, "gold/ends")) is not None:
        # The gold tables count by the minute: too coarse for such a time.
        bucket_secs = bucket_of(exact_secs)
        counts = ", ".join(f"count(*) FILTER (WHERE outcome = '{name}') AS {name}" for name in OUTCOMES)
        quantiles = ", ".join(
            f"approx_percentile_cont({share / 100}) WITHIN GROUP (ORDER BY {value}) AS {what}_p{share}_ms"
            for what, value in (("wait", "CAST(wait_ms AS DOUBLE)"), ("run", "run_us / 1000.0"))
            for share in PERCENTILES
        )
        rows = figures.rows("gold/ends", f"{_bucket('ended_at', bucket_secs)}, {counts}, {quantiles}", "GROUP BY 1")
        return bucket_secs, rows, rows
    sums = ", ".join(f"sum({name}) AS {name}" for name in OUTCOMES)
    # Of all names and minutes the highest: percentiles cannot be averaged.
    columns = [f"{what}_p{share}_ms" for what in ("wait", "run") for share in PERCENTILES]
    highest = ", ".join(f"max({name}) AS {name}" for name in columns)
    bucket = _bucket("minute", bucket_secs)
    return (
        bucket_secs,
        figures.rows("gold/throughput", f"{bucket}, {sums}", "GROUP BY 1"),
        figures.rows("gold/latency", f"{bucket}, {highest}", "GROUP BY 1"),
    )


def _epoch_ms(column: str) -> str:
    return f"CAST(arrow_cast({column}, 'Timestamp(Millisecond, None)') AS BIGINT)"


def _bucket(column: str, bucket_secs: float) -> str:
    return f"{_epoch_ms(column)} / {round(1000 * bucket_secs)} AS bucket"


def _span_secs(figures: Figures, name: str) -> float | None:
    """Return the seconds between the first and the last row; None if there is none."""
    time = _epoch_ms(TIMES[name])
    rows = figures.rows(name, f"(max({time}) - min({time})) / 1000.0 AS secs")
    return rows[0]["secs"] if rows else None


def bucket_of(span_secs: float) -> float:
    """Return the length of a bucket, in seconds, that shows this time with at most `BUCKETS` points."""
    return next((step for step in TIME_STEPS if span_secs / step <= BUCKETS), TIME_STEPS[-1])


def _points(rows: Rows, column: str, bucket_secs: float) -> Points:
    """Return the values by the start of their bucket, from the first to the last without a gap."""
    values = {row["bucket"]: row[column] for row in rows}
    if not values:
        return []
    return [(number * bucket_secs, values.get(number)) for number in range(min(values), max(values) + 1)]


def _unit(bucket_secs: float) -> str:
    return "second" if bucket_secs < 60 else "minute"


def backlog_of(figures: Figures, bucket_secs: float = 60) -> tuple[Points, Forecast]:
    """Return the backlog per bucket, and its forecast."""
    changes: dict[datetime, list[int]] = defaultdict(lambda: [0, 0])
    for side, column in enumerate(("created_at", "done_at")):
        known = "created_at IS NOT NULL AND done_at IS NOT NULL" if side else "created_at IS NOT NULL"
        rows = figures.rows(
            "silver/jobs", f"{_bucket(column, bucket_secs)}, count(*) AS jobs", f"AND {known} GROUP BY 1"
        )
        for row in rows:
            start = datetime.fromtimestamp(row["bucket"] * bucket_secs, UTC)
            # Jobs from before are counted, but not shown.
            changes[start if figures.since is None else max(start, figures.since)][side] += row["jobs"]
    if not changes:
        return [], Forecast("No jobs yet.", [])
    size = 0
    line: Points = []
    for start in sorted(changes):
        size += changes[start][0] - changes[start][1]
        line.append((start.timestamp(), float(size)))
    return line, forecast_of(changes, size, bucket_secs)


def forecast_of(changes: Mapping[datetime, Sequence[int]], size: int, bucket_secs: float = 60) -> Forecast:
    """Extrapolate the rates of the last buckets."""
    last = max(changes)
    bucket = timedelta(seconds=bucket_secs)
    recent = [counts for start, counts in changes.items() if last - start < bucket * FORECAST_BUCKETS]
    span = min(FORECAST_BUCKETS, max((last - min(changes)) / bucket + 1, 1))
    per_bucket = [sum(counts[side] for counts in recent) / span for side in (0, 1)]
    unit = _unit(bucket_secs)
    came, went = (count * (1 if unit == "second" else 60) / bucket_secs for count in per_bucket)
    rates = f"{came:,.1f} jobs created and {went:,.1f} ended per {unit} recently"
    if size == 0:
        return Forecast(f"No backlog: {rates}.", [])
    growth = per_bucket[0] - per_bucket[1]
    ahead = min(FORECAST_BUCKETS, max(len(changes) // 3, 1))  # not longer than what it is made from
    points: Points = [
        (last.timestamp() + bucket_secs * number, max(size + growth * number, 0.0)) for number in range(ahead + 1)
    ]
    if went > came:
        return Forecast(f"Backlog of {size:,}: {rates}; empty in about {size / (went - came):,.0f} {unit}s.", points)
    return Forecast(f"Backlog of {size:,}: {rates}; at these rates it does not shrink.", points)


# --- sums and tables


def _warning(figures: Figures) -> str:
    # Letters that are gone were usually replayed or removed on purpose.
    trimmed = sorted(figures.state.trimmed.get("events", {}).items())
    shown = [(queue, count) for queue, count in trimmed if count and (not figures.queues or queue in figures.queues)]
    lost = ", ".join(f"{count:,} events of {escape(queue)}" for queue, count in shown)
    broken = figures.rows("gold/undecodable", "sum(entries) AS entries")
    parts = []
    if lost:
        parts.append(
            f"Not in these figures, because they were trimmed before they could be landed: {lost}. Raise "
            "<code>events_max_stream_len</code>, or run the pipeline more often."
        )
    if broken and broken[0]["entries"]:
        parts.append(
            f"{broken[0]['entries']:,} entries could not be decoded: see the table <code>gold_undecodable</code>."
        )
    return "".join(f'<div class="warn">{part}</div>' for part in parts)


def _tiles(figures: Figures) -> str:
    sums = figures.rows("gold/slo", ", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in ("jobs", *OUTCOMES)))
    jobs, completed, dead, cancelled = (sums[0][name] if sums else 0 for name in ("jobs", *OUTCOMES))
    failures = figures.rows("gold/failures", "coalesce(sum(failures), 0) AS count")
    clusters = figures.rows("gold/dlq_clusters", 'count(DISTINCT "cluster") AS count')
    tiles = (
        (f"{jobs:,}", "jobs ended"),
        (f"{completed / (jobs - cancelled):.2%}" if jobs > cancelled else "-", "completed, of those not cancelled"),
        (f"{dead:,}", "dead"),
        (f"{cancelled:,}", "cancelled"),
        (f"{failures[0]['count'] if failures else 0:,}", "failed runs"),
        (f"{clusters[0]['count'] if clusters else 0:,}", "clusters of dead letters"),
    )
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles)
        + "</div>"
    )


def _top(figures: Figures, column: str, otherwise: str) -> list[Bar]:
    rows = figures.rows(
        "gold/failures",
        f"coalesce(nullif({column}, ''), '{otherwise}') AS label, sum(failures) AS count",
        f"GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {MAX_ROWS}",
    )
    return [Bar(row["label"], row["count"], f"{row['count']:,}") for row in rows]


def _table(figures: Figures, name: str, columns: Mapping[str, str], rest: str, *, code: Sequence[str] = ()) -> str:
    """Return an HTML table of headings and SQL expressions; nothing if there are no rows. `code`: in monospace."""
    rows = figures.rows(name, ", ".join(f'{sql} AS "{heading}"' for heading, sql in columns.items()), rest)
    if not rows:
        return ""
    lines = ("".join(_cell(value, is_code=heading in code) for heading, value in row.items()) for row in rows)
    numbers = {heading for heading, value in rows[0].items() if isinstance(value, int | float)}
    head = "".join(f"<th{' class=n' if heading in numbers else ''}>{heading}</th>" for heading in columns)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: object, *, is_code: bool) -> str:
    if isinstance(value, int | float):
        return f'<td class="n">{value:{".1%" if isinstance(value, float) else ","}}</td>'
    text = f"{value:%Y-%m-%d %H:%M}" if isinstance(value, datetime) else escape(str(value or ""))
    return f"<td><code>{text}</code></td>" if is_code else f"<td>{text}</td>"


def _tables(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield headings and tables."""
    # Quoted: `cluster` is a word of the SQL.
    columns = {name: f'"{name}"' for name in _CLUSTERS} | {
        "still dead": "dead",
        "error": "concat(coalesce(error_type, ''), ': ', coalesce(fingerprint, ''))",
    }
    rest = f'ORDER BY letters DESC, "cluster" LIMIT {MAX_ROWS}'
    yield "Dead letters", _table(figures, "gold/dlq_clusters", columns, rest, code=("cluster", "error")) or NONE
    columns = {"time": "repaired_at", **{name: f'"{name}"' for name in ("repair", "queue", "cluster")}}
    columns |= {name: f"count(*) FILTER (WHERE outcome = '{name}')" for name in (*OUTCOMES, "pending")}
    rest = f"GROUP BY 1, 2, 3, 4 ORDER BY 1 DESC, 2 DESC, 3 DESC, 4 DESC LIMIT {MAX_ROWS}"
    yield "Repairs", _table(figures, "gold/repairs", columns, rest, code=("repair", "cluster"))
    names = ("queue", "stream", "name", "field", "rule", "sample", "sample_job_id", "jobs")
    rest = f"ORDER BY jobs DESC, queue, name, field LIMIT {MAX_ROWS * 2}"
    columns = {name.replace("_", " "): name for name in names}
    yield "Contract violations", _table(figures, "gold/violations", columns, rest)
    columns = {name: name for name in ("day", "queue", "name", "jobs")}
    shares = ("completed", "first_try", "within_1s", "within_10s", "within_60s")
    columns |= {name.replace("_", " "): f"{name} / CAST(jobs AS DOUBLE)" for name in shares}
    rest = f"ORDER BY 1 DESC, 2 DESC, 3 DESC LIMIT {MAX_ROWS * 2}"
    yield "Per day", _table(figures, "gold/slo", columns, rest) or NONE
