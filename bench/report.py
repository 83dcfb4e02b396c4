"""`docs/benchmarks.md`, its plots and the README's table, all made from one run's file: `make bench-report`."""

from __future__ import annotations

import re
import statistics
from html import escape
from typing import TYPE_CHECKING

from bench.paths import PUBLISHED, ROOT
from bench.plan import OTHERS_ROUNDS
from tampu.spark.lake.charts import COLOURS, WIDTH, Bar, Series, bar_chart, line_chart

if TYPE_CHECKING:
    from bench.record import Record
    from tampu.spark.lake.charts import Chart

PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

#: Scenarios with many contestants, and what each is, in a line.
MAIN = {
    "queue-add": "one add after the other, one client",
    "queue-add-bulk-50": "bulks of 50, one after the other",
    "queue-add-bulk-1000": "bulks of 1000, one after the other",
    "queue-add-concurrent": "all adds started at once (ours and chasquimq 10,000, others 2,000)",
    "queue-add-delayed": "one add after the other, due in an hour",
    "worker-generic": "a worker with concurrency 1",
    "worker-concurrent": "a worker with concurrency 100, or what the peer has for it; events off",
    "worker-delayed-end-to-end": "jobs due at one instant, until the last has run",
    "worker-retry-throughput": "every job fails once and is retried at once, until all have succeeded",
}
OURS_ONLY = {
    "queue-add-iterator": "one bulk of 200,000 from an iterator",
    "queue-add-delayed-concurrent": "10,000 delayed adds started at once",
    "worker-concurrent-events": "concurrency 100, events on",
    "worker-concurrent-results": "concurrency 100, results stored",
    "worker-sync": "`def` handlers, in threads",
}
IN_README = (
    "queue-add",
    "queue-add-bulk-50",
    "queue-add-bulk-1000",
    "queue-add-concurrent",
    "worker-generic",
    "worker-concurrent",
    "worker-delayed-end-to-end",
    "worker-retry-throughput",
)
LIMITS = ("redis-benchmark", "bare loop")
LATENCY_TEXT = (
    "Milliseconds from the moment a job should have been added to the start of its handler. The loop is open: a job "
    "that the adding side is late with counts from when it was due, so no stall hides jobs (coordinated omission). "
    "Producer and worker share one process."
)


def publish(record: Record) -> None:
    """Write everything that is made from a run."""
    for folder in (PLOTS, PUBLISHED.parent):
        folder.mkdir(parents=True, exist_ok=True)
    record.save(PUBLISHED)
    for name, svg in plots(record).items():
        (PLOTS / f"{name}.svg").write_text(svg)
    PAGE.write_text(page(record))
    readme = README.read_text()
    if BEGIN in readme and END in readme:
        README.write_text(with_table(readme, readme_table(record)))
    else:
        print(f"bench: README.md has no {BEGIN} ... {END}: its table was left alone")


def with_table(text: str, table: str) -> str:
    """The text with what stands between the two marks replaced."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", text, flags=re.DOTALL)


# --- the page


def page(record: Record) -> str:
    parts = [
        "# Benchmarks",
        "*Made by `make bench`, which measures everything (under 20 minutes) and keeps every sample in "
        "`build/bench/published.json`; do not edit. `make bench-report` makes this page from such a file again, "
        "`make bench-quick` measures the bars only (under 3 minutes), `tampu bench` your own server.*",
        how(record),
        _section(
            "Everybody",
            main_table(record),
            "Jobs per second, medians; in brackets how often ours is theirs. A dash: the peer has no such call.",
            "\n".join(f"- `{name}`: {text}" for name, text in MAIN.items() if name in record.scenarios()),
            *(f"![{name}](benchmarks/{name}.svg)" for name in MAIN if name in record.scenarios()),
        ),
        _section("The limit", limit_table(record), limit_text(record)),
        _section("Further scenarios, beside the original", pair_table(record, OURS_ONLY)),
        _section("Payloads", payload_table(record), "Jobs per second by the size of the payload."),
        _section("Pickup latency", latency_table(record), LATENCY_TEXT),
        _section(
            "CPU per job",
            cpu_table(record),
            "Microseconds of CPU time per job, client and server, as the kernel counts it; worker processes included.",
        ),
        _section(
            "Worker processes",
            process_table(record),
            "![processes](benchmarks/processes.svg)",
        ),
        _section("Memory", memory_text(record)),
        _section("RSMQ", rsmq_table(record), "Messages per second, one client; slices of 150 messages by turns."),
        _section("Spark", spark_table(record), "Rows, events or jobs per second; a warm session of `local[2,4]`."),
        _section("Bars", bar_table(record), "Ratios of medians that must hold; `make bench-quick` checks most."),
        _section("Who took part, and how it was set up", settings_table(record)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, main: str, *more: str) -> str:
    """Nothing at all when the run has nothing for it."""
    return "\n\n".join([f"## {title}", main, *more]) if main else ""


def how(record: Record) -> str:
    machine = record.machine
    return (
        f"Taken {record.at[:10]} on {machine['cores']} cores ({machine['cpu']}, {machine['memory_gb']} GB, "
        f"{machine['system']}), Python {machine['python']}, {record.server} without persistence on the same machine. "
        f"{record.rounds} rounds (peers other than chasquimq in the first {OTHERS_ROUNDS}); in each every contestant "
        "takes its turn in every scenario, in an order that rotates; the server is "
        "emptied before each. Medians are shown, every sample is in the file. Payloads are "
        "about 100 bytes, handlers do nothing. Each peer runs in an environment of its own with its makers' settings "
        "for throughput, listed below. Workers that are programs of their own are timed from their first job on, so "
        "their start-up does not count; ours, chasquimq, arq, SAQ, streaQ and BullMQ from the worker's start, with "
        "connecting. Ours reads 256 jobs at a time (`batch=256`) where a sample's arguments in the file say so, as in "
        "`worker-concurrent`, whose default of 64 is listed; otherwise 64. "
        "Compare within one run only."
    )


def main_table(record: Record) -> str:
    scenarios = [name for name in MAIN if name in record.scenarios()]
    names = [name for name in _everybody(record, scenarios) if name not in LIMITS]
    rows = [["", *(f"`{name}`" for name in scenarios)]]
    for name in names:
        label = f"**{name}**" if name.startswith("tampu") else name
        rows.append([label, *(_cell(record, scenario, name) for scenario in scenarios)])
    rows += [
        [name, f"could not be installed: {about['unavailable']}", *[""] * (len(scenarios) - 1)]
        for name, about in record.contestants.items()
        if "unavailable" in about
    ]
    return _table(rows)


def _cell(record: Record, scenario: str, name: str) -> str:
    median = record.median(scenario, name)
    if median is None:
        return "failed" if record.error(scenario, name) else "-"
    if name.startswith("tampu"):
        return f"**{_number(median)}**" if name == "tampu" else _number(median)
    ours = record.median(scenario, "tampu")
    return f"{_number(median)} ({ours / median:.1f})" if ours else _number(median)


def limit_table(record: Record) -> str:
    rows = [["scenario", "the limit", "jobs/s", "ours", "share"]]
    for scenario in record.scenarios():
        for limit in LIMITS:
            theirs, ours = record.median(scenario, limit), record.median(scenario, "tampu")
            if theirs and ours:
                rows.append([f"`{scenario}`", limit, _number(theirs), _number(ours), f"{ours / theirs:.0%}"])
    return _table(rows) if len(rows) > 1 else ""


def limit_text(record: Record) -> str:
    text = (
        "`redis-benchmark` sends the same XADD from C over one connection, 1, 50 or 1000 at a time; the bare loop is "
        "XREADGROUP and XACKDEL (or XADD) from a blocking socket with hiredis, without decoding, handlers or leases."
    )
    add, ping = (record.median("one-add-beside-one-ping", "tampu", figure) for figure in ("add_us", "ping_us"))
    if add and ping:
        text += (
            f" One add takes {add:.0f} µs where one PING over the same connection takes {ping:.0f} µs "
            f"({add / ping:.2f} times; a hundred of each in turn)."
        )
    return text


def pair_table(record: Record, scenarios: dict[str, str]) -> str:
    rows = [["scenario", "", "tampu", "chasquimq", "ratio"]]
    for name, text in scenarios.items():
        ours, theirs = record.median(name, "tampu"), record.median(name, "chasquimq")
        if ours:
            rows.append([f"`{name}`", text, *_pair(ours, theirs)])
    return _table(rows) if len(rows) > 1 else ""


def payload_table(record: Record) -> str:
    rows = [["payload", "add_bulk(50), tampu", "chasquimq", "ratio", "run, tampu", "chasquimq", "ratio"]]
    for size in ("100 B", "1 KB", "10 KB", "100 KB"):
        row = [size]
        for what in ("add", "work"):
            ours = record.median(f"payload-{what} {size}", "tampu")
            if ours is None:
                return ""
            row += _pair(ours, record.median(f"payload-{what} {size}", "chasquimq"))
        rows.append(row)
    return _table(rows)


def latency_table(record: Record) -> str:
    figures = ("p50_ms", "p90_ms", "p99_ms", "p99.9_ms", "max_ms")
    rows = [["jobs/s", "", *(figure.removesuffix("_ms") for figure in figures)]]
    for scenario in record.scenarios():
        if scenario.startswith("latency-"):
            for name in record.contestants_of(scenario):
                found = [record.median(scenario, name, figure) for figure in figures]
                if found[0] is None:
                    rows.append([scenario[8:], name, record.error(scenario, name) or "-", "", "", "", ""])
                else:
                    rows.append([scenario[8:], name, *(f"{value:.2f}" for value in found if value is not None)])
    return _table(rows) if len(rows) > 1 else ""


def cpu_table(record: Record) -> str:
    scenarios = [name for name in ("queue-add-bulk-50", "queue-add", "worker-concurrent") if name in record.scenarios()]
    rows = [["", *(f"`{scenario}` {side}" for scenario in scenarios for side in ("client", "server"))]]
    for name in _everybody(record, scenarios):
        row = [name]
        for scenario in scenarios:
            for figure in ("client_us", "server_us"):
                value = record.median(scenario, name, figure)
                row.append("-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}")
        rows.append(row)
    return _table(rows)


def process_table(record: Record) -> str:
    rows = [["processes", "jobs/s", "spread"]]
    for count in (1, 2, 3, 4):
        values = record.values(f"processes-{count}", "tampu")
        if values:
            spread = f"{_number(min(values))} to {_number(max(values))}"
            rows.append([str(count), _number(statistics.median(values)), spread])
    if len(rows) == 1:
        return ""
    return (
        "One queue, `worker-concurrent` in each process. The server has one of the cores to itself at best.\n\n"
        + _table(rows)
    )


def memory_text(record: Record) -> str:
    per_job, worker, producer = (
        record.median("memory", "tampu", figure) for figure in ("server_bytes_per_job", "worker_mb", "producer_mb")
    )
    if per_job is None:
        return ""
    text = (
        f"With 1,000,000 jobs waiting the server holds {per_job:.0f} bytes per job; a worker on that queue has "
        f"{worker:.0f} MB resident at most."
    )
    if producer is not None:
        text += f" The producer that added the million from a generator had {producer:.0f} MB, their ids included."
    return text


def rsmq_table(record: Record) -> str:
    scenarios = [name for name in ("rsmq-send", "rsmq-receive-delete") if name in record.scenarios()]
    rows = [["", *(f"`{name}`" for name in scenarios)]]
    for name in _everybody(record, scenarios):
        if name:
            row = [name]
            for scenario in scenarios:
                value = record.median(scenario, name)
                row.append("-" if value is None else _number(value))
            rows.append(row)
    rows += [
        [name, f"could not be installed: {record.contestants[name]['unavailable']}", ""]
        for name in ("rsmq", "pyrsmq")
        if "unavailable" in record.contestants.get(name, {})
    ]
    return _table(rows) if len(rows) > 1 else ""


def spark_table(record: Record) -> str:
    rows = [["", "", "rows/s", "spread"]]
    for scenario in record.scenarios():
        if scenario.startswith("spark-"):
            for name in record.contestants_of(scenario):
                values = record.values(scenario, name)
                if values:
                    spread = f"{_number(min(values))} to {_number(max(values))}"
                    rows.append([f"`{scenario}`", name, _number(statistics.median(values)), spread])
    return _table(rows) if len(rows) > 1 else ""


def bar_table(record: Record) -> str:
    rows = [["bar", "ratio", "needs", ""]]
    for bar in record.bars:
        sign = "at most" if bar["is_at_most"] else "at least"
        holds = "ok" if bar["holds"] else "**short**"
        rows.append([f"`{bar['name']}`", f"{bar['ratio']:.2f}", f"{sign} {bar['needs']:g}", holds])
    return _table(rows)


def settings_table(record: Record) -> str:
    rows = [["", "versions", "adding", "working"]]
    for name, about in record.contestants.items():
        if "unavailable" in about:
            rows.append([name, f"could not be installed: {about['unavailable']}", "", ""])
            continue
        versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        settings = about["settings"]
        first = settings.get("adding") or settings.get("session", "")
        rows.append([name, versions, first, settings.get("working", "")])
    return _table(rows)


# --- the README


def readme_table(record: Record) -> str:
    """Ours beside the original, the best of the others and the limit."""
    rows = [["jobs per second", "tampu", "chasquimq 1.3.0 (Rust)", "best of the others", "the limit"]]
    for scenario in IN_README:
        ours = record.median(scenario, "tampu")
        if ours is None:
            continue
        others = {
            name: median
            for name in record.contestants_of(scenario)
            if not name.startswith("tampu") and name not in (*LIMITS, "chasquimq")
            if (median := record.median(scenario, name))
        }
        best = max(others, key=others.__getitem__, default=None)
        limit = next((name for name in LIMITS if record.median(scenario, name)), None)
        rows.append(
            [
                f"`{scenario}`",
                f"**{_number(ours)}**",
                _cell(record, scenario, "chasquimq"),
                f"{_number(others[best])} ({best}, {ours / others[best]:.1f})" if best else "-",
                f"{_number(record.median(scenario, limit) or 0)} ({limit})" if limit else "",
            ]
        )
    latency = record.median("latency-1000", "tampu", "p99_ms")
    tail = f" Pickup at 1,000 jobs/s: p99 {latency:.1f} ms." if latency else ""
    missing = [name for name, about in record.contestants.items() if "unavailable" in about]
    if missing:
        tail += f" Could not be installed for this run: {', '.join(missing)}."
    return (
        f"{_table(rows)}\n\nIn brackets how often ours is theirs. {record.machine['cores']} cores, {record.server}, "
        f"medians of {record.rounds} interleaved rounds (others: {OTHERS_ROUNDS}), {record.at[:10]}.{tail} "
        "[All figures, peers and settings](docs/benchmarks.md); `make bench` measures again."
    )


# --- plots


#: Follows the reader's light or dark theme.
PLOT_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #57606a } .title { font-weight: 600; font-size: 14px }
.grid { stroke: #d0d7de } .spread { stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #9198a1 } .grid { stroke: #3d444d } .spread { stroke: #e6edf3 } }
</style>"""
OTHERS_COLOUR = "#9aa4b2"


def plots(record: Record) -> dict[str, str]:
    drawn = {}
    for scenario in MAIN:
        bars = []
        for name in record.contestants_of(scenario):
            if values := record.values(scenario, name):
                colour = COLOURS[1] if name.startswith("tampu") else COLOURS[0] if name in LIMITS else OTHERS_COLOUR
                median = statistics.median(values)
                bars.append(Bar(name, median, _number(median), colour, (min(values), max(values))))
        if bars:
            bars.sort(key=lambda bar: -bar.value)
            chart = bar_chart(scenario, bars, log=True, label_width=170)
            drawn[scenario] = _svg_file(chart, f"{MAIN[scenario]} (jobs/s, logarithmic)")
    points = [
        (float(count), median) for count in (1, 2, 3, 4) if (median := record.median(f"processes-{count}", "tampu"))
    ]
    if points:
        line = Series("tampu", points)
        chart = line_chart("Worker processes on one queue", "jobs/s", [line], x_label=lambda count: f"{count:.0f}")
        drawn["processes"] = _svg_file(chart, "tampu, by the number of processes")
    return drawn


def _svg_file(chart: Chart, subtitle: str) -> str:
    title, top = escape(chart.title), 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {chart.height + top}" width="{WIDTH}" '
        f'role="img" aria-label="{title}">{PLOT_STYLE}\n<text x="12" y="22" class="title">{title}</text>\n'
        f'<text x="12" y="40">{escape(subtitle)}</text>\n<g transform="translate(0 {top})">{chart.elements}</g></svg>\n'
    )


def _everybody(record: Record, scenarios: list[str]) -> list[str]:
    """In the order of the contestants, ours first."""
    found = dict.fromkeys(name for scenario in scenarios for name in record.contestants_of(scenario))
    ours = [name for name in found if name.startswith("tampu")]
    listed = [name for name in record.contestants if name in found and name not in ours]
    return [*ours, *listed, *(name for name in found if name not in ours and name not in listed)]


def _pair(ours: float, theirs: float | None) -> list[str]:
    return [_number(ours), _number(theirs) if theirs else "-", f"{ours / theirs:.1f}" if theirs else ""]


def _number(value: float) -> str:
    """Three digits are all that a benchmark knows."""
    if value >= 1000:
        digits = len(str(int(value)))
        value = round(value, 3 - digits)
    return f"{value:,.0f}"


def _table(rows: list[list[str]]) -> str:
    head, *rest = rows
    is_number = [all(re.match(r"[*\d(-]|$|failed", row[column]) for row in rest) for column in range(len(head))]
    rule = ["---:" if number else "---" for number in is_number]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rest])
