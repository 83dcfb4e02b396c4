"""`tampu pipeline report`: the gold tables as one self-contained HTML page. Needs no Spark."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tampu.spark.lake.charts import TIME_STEPS, Bar, Series, bar_chart, line_chart
from tampu.spark.lake.folder import LakeVersion, lake_folder
from tampu.spark.lake.rows import PERCENTILES, count_by_time, ends_by_time, published, read_rows, span_of_ends

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Most rows of a table, and bars of a plot.
MOST_ROWS = 12
#: Columns of the table of clusters that are numbers.
NUMBERS = ("letters", "still dead")
#: Maximum number of points in a line over time.
BUCKETS = 90
#: Buckets that the forecast looks back, and ahead.
FORECAST_BUCKETS = 15

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
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}
.line.s3{stroke:var(--s3)}.line.s4{stroke:var(--s4)}.line.s5{stroke:var(--s5)}
.area.s0,.dot.s0{fill:var(--s0)}.dot.s1,.bar{fill:var(--s1)}.dot.s2{fill:var(--s2)}
.dot.s3{fill:var(--s3)}.dot.s4{fill:var(--s4)}.dot.s5{fill:var(--s5)}
.hit:hover{fill:var(--hit)}
.legend{display:flex;gap:18px;flex-wrap:wrap;font-size:13px;color:var(--soft);padding-left:64px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.legend .s0{background:var(--s0)!important}.legend .s1{background:var(--s1)!important}
.legend .s2{background:var(--s2)!important}.legend .s3{background:var(--s3)!important}
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
    points: list[tuple[float, float | None]]


def write_report(lake: str | Path, output: str | Path, *, now: datetime | None = None) -> Path:
    """Write the page; `ConfigError` if the folder is not a lake."""
    folder, target = lake_folder(lake), Path(output)
    published(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = render(folder, now or datetime.now(UTC))
    # It shows names and errors of jobs: only this user may read it, unless the file exists already.
    with open(target, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(page)
    return target


def render(lake: Path, now: datetime) -> str:
    """Return the page as text."""
    state = LakeVersion.load(lake)
    throughput = read_rows(lake, "gold/throughput", state)
    latency = read_rows(lake, "gold/latency", state)
    failures = read_rows(lake, "gold/failures", state)
    clusters = read_rows(lake, "gold/dlq_clusters", state)
    slo = read_rows(lake, "gold/slo", state)
    undecodable = read_rows(lake, "gold/undecodable", state)
    repairs = read_rows(lake, "gold/repairs", state)
    violations = read_rows(lake, "gold/violations", state)
    queues = sorted({row["queue"] for rows in (throughput, clusters, failures) for row in rows})
    minutes = {row["minute"] for row in throughput}
    span_secs = (max(minutes) - min(minutes)).total_seconds() + 60 if minutes else 60.0
    bucket_secs = max(bucket_of(span_secs), 60)
    if span_secs <= 60 * BUCKETS and (exact_secs := span_of_ends(lake, state)) is not None:
        # The gold tables count by the minute: too coarse for such a time.
        bucket_secs = bucket_of(exact_secs)
        throughput = latency = ends_by_time(lake, state, bucket_secs)
    per = _unit(bucket_secs)
    ended = _rates(throughput, ("completed", "dead", "cancelled"), bucket_secs)
    backlog, forecast = backlog_of(lake, state, bucket_secs)
    body = [
        f"<h1>{escape(', '.join(queues) or 'no jobs yet')}</h1>",
        f'<p class="sub">tampu, {now:%Y-%m-%d %H:%M} UTC, round {state.round} of the lake '
        f"<code>{escape(str(lake))}</code></p>",
        _warning(state, undecodable),
        _tiles(slo, failures, clusters),
        "<h2>Throughput</h2>",
        line_chart(f"Ended jobs per {per}", "jobs/s" if per == "second" else "jobs/min", ended).figure(),
        "<h2>Latency</h2>",
        line_chart("Wait for a worker", "ms", _percentiles(latency, "wait", bucket_secs), log=True).figure(),
        line_chart("Run time", "ms", _percentiles(latency, "run", bucket_secs), log=True).figure(),
        "<h2>Backlog</h2>",
        f"<p>{escape(forecast.sentence)}</p>",
        line_chart(
            "Jobs created and not ended, by their events",
            "jobs",
            [
                Series("backlog", backlog),
                *([Series("at the current rates", forecast.points, dashed=True)] if forecast.points else []),
            ],
        ).figure(),
        "<h2>Failures</h2>",
        bar_chart("Failed runs by error", _top(failures, "fingerprint", "(no text)")).figure(),
        bar_chart("Failed runs by name", _top(failures, "name", "(no name)")).figure(),
        "<h2>Dead letters</h2>",
        _clusters_table(clusters),
        *(("<h2>Repairs</h2>", _repairs_table(repairs)) if repairs else ()),
        *(("<h2>Contract violations</h2>", _violations_table(violations)) if violations else ()),
        "<h2>Per day</h2>",
        _slo_table(slo),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing in it may run or load anything, even if a text from a queue were not escaped.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'\">"
        # An empty icon: browsers request one, and a file cannot serve it.
        '<link rel="icon" href="data:,">'
        f"<title>tampu: {escape(', '.join(queues))}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def bucket_of(span_secs: float) -> float:
    """Return the length of a bucket, in seconds, that shows this time with at most `BUCKETS` points."""
    return next((step for step in TIME_STEPS if span_secs / step <= BUCKETS), TIME_STEPS[-1])


def _unit(bucket_secs: float) -> str:
    return "second" if bucket_secs < 60 else "minute"


def backlog_of(
    lake: Path, state: LakeVersion, bucket_secs: float = 60
) -> tuple[list[tuple[float, float | None]], Forecast]:
    """Return the backlog per bucket, and its forecast."""
    changes: dict[datetime, list[int]] = defaultdict(lambda: [0, 0])
    for side, column in enumerate(("created_at", "done_at")):
        for minute, count in count_by_time(lake, "silver/jobs", column, state, bucket_secs=bucket_secs):
            changes[minute][side] += count
    if not changes:
        return [], Forecast("No jobs yet.", [])
    size = 0
    line: list[tuple[float, float | None]] = []
    for minute in sorted(changes):
        size += changes[minute][0] - changes[minute][1]
        line.append((minute.timestamp(), float(size)))
    return line, forecast_of(changes, size, bucket_secs)


def forecast_of(changes: dict[datetime, list[int]], size: int, bucket_secs: float = 60) -> Forecast:
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
    points: list[tuple[float, float | None]] = [
        (last.timestamp() + bucket_secs * number, max(size + growth * number, 0.0)) for number in range(ahead + 1)
    ]
    if went > came:
        return Forecast(f"Backlog of {size:,}: {rates}; empty in about {size / (went - came):,.0f} {unit}s.", points)
    return Forecast(f"Backlog of {size:,}: {rates}; at these rates it does not shrink.", points)


def _warning(state: LakeVersion, undecodable: list[dict[str, Any]]) -> str:
    # Letters that are gone were usually replayed or removed on purpose.
    trimmed = sorted(state.trimmed.get("events", {}).items())
    lost = ", ".join(f"{count:,} events of {escape(queue)}" for queue, count in trimmed if count)
    broken = sum(row["entries"] for row in undecodable)
    parts = []
    if lost:
        parts.append(
            f"Not in these figures, because they were trimmed before they could be landed: {lost}. Raise "
            "<code>events_max_stream_len</code>, or run the pipeline more often."
        )
    if broken:
        parts.append(f"{broken:,} entries could not be decoded: see the table <code>gold_undecodable</code>.")
    return "".join(f'<div class="warn">{part}</div>' for part in parts)


def _tiles(slo: list[dict[str, Any]], failures: list[dict[str, Any]], clusters: list[dict[str, Any]]) -> str:
    jobs, completed, dead, cancelled = (
        sum(row[key] for row in slo) for key in ("jobs", "completed", "dead", "cancelled")
    )
    share = f"{completed / (jobs - cancelled):.2%}" if jobs > cancelled else "-"
    tiles = (
        (f"{jobs:,}", "jobs ended"),
        (share, "completed, of those not cancelled"),
        (f"{dead:,}", "dead"),
        (f"{cancelled:,}", "cancelled"),
        (f"{sum(row['failures'] for row in failures):,}", "failed runs"),
        (f"{len({row['cluster'] for row in clusters}):,}", "clusters of dead letters"),
    )
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles)
        + "</div>"
    )


def _by_bucket(rows: Iterable[dict[str, Any]], bucket_secs: float) -> dict[float, list[dict[str, Any]]]:
    """Return the rows by the start of their bucket, in epoch seconds, from the first to the last without a gap."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        # A float of today has a precision of some microseconds of a bucket.
        found[int(row["minute"].timestamp() / bucket_secs + 1e-4)].append(row)
    if not found:
        return {}
    return {number * bucket_secs: found.get(number, []) for number in range(min(found), max(found) + 1)}


def _rates(rows: list[dict[str, Any]], columns: tuple[str, ...], bucket_secs: float) -> list[Series]:
    unit_secs = 1 if _unit(bucket_secs) == "second" else 60
    by_bucket = _by_bucket(rows, bucket_secs)
    return [
        Series(
            column,
            [
                (start, sum(row[column] for row in found) * unit_secs / bucket_secs)
                for start, found in by_bucket.items()
            ],
        )
        for column in columns
    ]


def _percentiles(rows: list[dict[str, Any]], what: str, bucket_secs: float) -> list[Series]:
    """Return the highest percentile of all names and minutes per bucket: percentiles cannot be averaged."""
    by_bucket = _by_bucket(rows, bucket_secs)
    lines = []
    for percentile in PERCENTILES:
        column = f"{what}_p{percentile}_ms"
        points: list[tuple[float, float | None]] = []
        for start, found in by_bucket.items():
            values = [row[column] for row in found if row.get(column) is not None]
            points.append((start, max(values) if values else None))
        lines.append(Series(f"p{percentile}", points))
    return lines


def _top(rows: list[dict[str, Any]], column: str, otherwise: str) -> list[Bar]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row[column] or otherwise] += row["failures"]
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_ROWS]
    return [Bar(name, count, f"{count:,}") for name, count in largest]


def _clusters_table(rows: list[dict[str, Any]]) -> str:
    ordered = sorted(rows, key=lambda row: (-row["letters"], row["cluster"]))[:MOST_ROWS]
    if not ordered:
        return '<p class="empty">none</p>'
    lines = [
        f"<tr><td><code>{row['cluster']}</code></td><td>{escape(row['queue'])}</td><td>{escape(row['name'] or '')}</td>"
        f'<td class="n">{row["letters"]:,}</td><td class="n">{row["dead"]:,}</td><td>{escape(row["reason"] or "")}</td>'
        f"<td><code>{escape(row['error_type'] or '')}: {escape(row['fingerprint'] or '')}</code></td></tr>"
        for row in ordered
    ]
    names = ("cluster", "queue", "name", "letters", "still dead", "reason", "error")
    head = "<tr>" + "".join(f"<th{' class=n' if name in NUMBERS else ''}>{name}</th>" for name in names) + "</tr>"
    return f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'


def _repairs_table(rows: list[dict[str, Any]]) -> str:
    counts: dict[tuple[datetime, str, str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["repaired_at"], row["repair"], row["queue"], row["cluster"]][row["outcome"]] += 1
    outcomes = ("completed", "dead", "cancelled", "pending")
    lines = []
    for (at, repair, queue, cluster), of_repair in sorted(counts.items(), reverse=True)[:MOST_ROWS]:
        numbers = "".join(f'<td class="n">{of_repair[outcome]:,}</td>' for outcome in outcomes)
        lines.append(
            f"<tr><td>{at:%Y-%m-%d %H:%M}</td><td><code>{escape(repair)}</code></td><td>{escape(queue)}</td>"
            f"<td><code>{escape(cluster)}</code></td>{numbers}</tr>"
        )
    head = "<tr><th>time</th><th>repair</th><th>queue</th><th>cluster</th>" + "".join(
        f'<th class="n">{name}</th>' for name in outcomes
    )
    return f'<div class="wide"><table>{head}</tr>{"".join(lines)}</table></div>'


def _violations_table(rows: list[dict[str, Any]]) -> str:
    ordered = sorted(rows, key=lambda row: (-row["jobs"], row["queue"], row["name"], row["field"]))[: MOST_ROWS * 2]
    columns = ("queue", "stream", "name", "field", "rule", "sample", "sample_job_id")
    lines = [
        "<tr>"
        + "".join(f"<td>{escape(row[column] or '')}</td>" for column in columns)
        + f'<td class="n">{row["jobs"]:,}</td></tr>'
        for row in ordered
    ]
    head = "<tr>" + "".join(f"<th>{name.replace('_', ' ')}</th>" for name in columns) + '<th class="n">jobs</th></tr>'
    return f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'


def _slo_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return '<p class="empty">none</p>'
    ordered = sorted(rows, key=lambda row: (row["day"], row["queue"], row["name"]), reverse=True)[: MOST_ROWS * 2]
    lines = []
    for row in ordered:
        shares = "".join(
            f'<td class="n">{row[key] / row["jobs"]:.1%}</td>'
            for key in ("completed", "first_try", "within_1s", "within_10s", "within_60s")
        )
        lines.append(
            f"<tr><td>{row['day']}</td><td>{escape(row['queue'])}</td><td>{escape(row['name'] or '')}</td>"
            f'<td class="n">{row["jobs"]:,}</td>{shares}</tr>'
        )
    head = "<tr><th>day</th><th>queue</th><th>name</th>" + "".join(
        f'<th class="n">{name}</th>'
        for name in ("jobs", "completed", "first try", "within 1 s", "within 10 s", "within 60 s")
    )
    return f'<div class="wide"><table>{head}</tr>{"".join(lines)}</table></div>'
