"""`tampu pipeline report`: the gold tables as one self-contained HTML page. Needs no Spark."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tampu.spark.lake.charts import Bar, Series, bar_chart, line_chart
from tampu.spark.lake.folder import lake_folder
from tampu.spark.lake.rows import count_by_minute, published, read_rows
from tampu.spark.lake.versions import LakeVersion

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Most rows of a table, and bars of a plot.
MOST_ROWS = 12
#: Columns of the table of clusters that are numbers.
NUMBERS = ("letters", "still dead")
#: Minutes that the forecast looks back, and ahead.
FORECAST_MINUTES = 15

STYLE = """
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#5b6470;--paper:#fff;--line:#d9dee4;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--paper:#14171a;--line:#30363d;--card:#1c2126}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
  max-width:920px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 8px;border-bottom:1px solid var(--line);padding-bottom:4px}
.sub{color:var(--soft);margin:2px 0 18px}.tiles{display:flex;flex-wrap:wrap;gap:10px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 16px;min-width:110px}
.tile b{display:block;font-size:22px}.tile span{color:var(--soft);font-size:13px}
figure{margin:18px 0}figcaption{font-weight:600;margin-bottom:4px}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:12px}.grid{stroke:var(--line)}.empty{color:var(--soft)}
.legend{display:flex;gap:18px;flex-wrap:wrap;font-size:13px;color:var(--soft);padding-left:64px}
.legend i{display:inline-block;width:12px;height:3px;margin-right:6px;vertical-align:middle}
table{border-collapse:collapse;width:100%;font-size:13px}
td,th{text-align:left;padding:5px 8px;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right}code{font-size:12px;word-break:break-word}.wide{overflow-x:auto}
.warn{background:#d55e0022;border:1px solid #d55e00;border-radius:6px;padding:8px 12px;margin:12px 0}
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
    backlog, forecast = backlog_of(lake, state)
    body = [
        f"<h1>{escape(', '.join(queues) or 'no jobs yet')}</h1>",
        f'<p class="sub">tampu, {now:%Y-%m-%d %H:%M} UTC, round {state.round} of the lake '
        f"<code>{escape(str(lake))}</code></p>",
        _warning(state, undecodable),
        _tiles(slo, failures, clusters),
        "<h2>Throughput</h2>",
        line_chart("Ended jobs per minute", "jobs/min", _sums(throughput, ("completed", "dead", "cancelled"))).figure(),
        "<h2>Latency</h2>",
        line_chart("Wait for a worker", "ms", _percentiles(latency, "wait"), log=True).figure(),
        line_chart("Run time", "ms", _percentiles(latency, "run"), log=True).figure(),
        "<h2>Backlog</h2>",
        f"<p>{escape(forecast.sentence)}</p>",
        line_chart(
            "Jobs created and not ended, by their events",
            "jobs",
            [Series("backlog", backlog), Series("at the current rates", forecast.points, dashed=True)],
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


def backlog_of(lake: Path, state: LakeVersion) -> tuple[list[tuple[float, float | None]], Forecast]:
    """Return the backlog per minute, and its forecast."""
    changes: dict[datetime, list[int]] = defaultdict(lambda: [0, 0])
    for side, column in enumerate(("created_at", "done_at")):
        for minute, count in count_by_minute(lake, "silver/jobs", column, state):
            changes[minute][side] += count
    if not changes:
        return [], Forecast("No jobs yet.", [])
    size = 0
    line: list[tuple[float, float | None]] = []
    for minute in sorted(changes):
        size += changes[minute][0] - changes[minute][1]
        line.append((minute.timestamp(), float(size)))
    return line, forecast_of(changes, size)


def forecast_of(changes: dict[datetime, list[int]], size: int) -> Forecast:
    """Extrapolate the rates of the last minutes."""
    last = max(changes)
    recent = [counts for minute, counts in changes.items() if minute > last - timedelta(minutes=FORECAST_MINUTES)]
    span = min(FORECAST_MINUTES, max((last - min(changes)).total_seconds() / 60 + 1, 1))
    came, went = (sum(counts[side] for counts in recent) / span for side in (0, 1))
    rates = f"{came:,.1f} jobs created and {went:,.1f} ended per minute recently"
    ahead = [(last + timedelta(minutes=m)).timestamp() for m in range(FORECAST_MINUTES + 1)]
    points: list[tuple[float, float | None]] = [
        (x, max(size + (came - went) * number, 0.0)) for number, x in enumerate(ahead)
    ]
    if size == 0:
        return Forecast(f"No backlog: {rates}.", points)
    if went > came:
        return Forecast(f"Backlog of {size:,}: {rates}; empty in about {size / (went - came):,.0f} minutes.", points)
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


def _by_minute(rows: Iterable[dict[str, Any]]) -> dict[datetime, list[dict[str, Any]]]:
    found: dict[datetime, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["minute"]].append(row)
    return dict(sorted(found.items()))


def _sums(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[Series]:
    by_minute = _by_minute(rows)
    return [
        Series(column, [(minute.timestamp(), sum(row[column] for row in found)) for minute, found in by_minute.items()])
        for column in columns
    ]


def _percentiles(rows: list[dict[str, Any]], what: str) -> list[Series]:
    """Return the highest percentile of all names per minute: percentiles cannot be averaged."""
    by_minute = _by_minute(rows)
    lines = []
    for percentile in (50, 95, 99):
        column = f"{what}_p{percentile}_ms"
        points: list[tuple[float, float | None]] = []
        for minute, found in by_minute.items():
            values = [row[column] for row in found if row[column] is not None]
            points.append((minute.timestamp(), max(values) if values else None))
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
