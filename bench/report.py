"""Generate docs/benchmarks.md, its plots and the README's tables from the file of one run: `make bench-report`."""

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
#: Each block of the README is between `<!-- bench:NAME:begin -->` and `<!-- bench:NAME:end -->`.
BLOCK = "<!-- bench:{name}:begin -->", "<!-- bench:{name}:end -->"

#: Scenarios with many contestants, each with a one-line description.
MAIN = {
    "worker-default": "`@queue.task` and `Worker(queue)` with default settings: events written, results stored; "
    "chasquimq with both on",
    "round-trip": "add a job and await its result, one caller; an idle worker",
    "round-trip-100": "the same from 100 callers at once",
    "queue-add": "one add after another, one client",
    "queue-add-bulk-50": "bulk adds of 50 jobs, one after another",
    "queue-add-bulk-1000": "bulk adds of 1,000 jobs, one after another",
    "queue-add-concurrent": "all adds started at once (tampu and chasquimq 10,000, others 2,000)",
    "queue-add-delayed": "one delayed add (1 h) after another",
    "worker-generic": "a worker with concurrency 1",
    "worker-concurrent": "a worker with concurrency 100, or the peer's equivalent; events off",
    "worker-delayed-end-to-end": "delayed jobs that are due at the same moment, until the last has run",
    "worker-retry-throughput": "every job fails once and is retried immediately, until all have succeeded",
}
OURS_ONLY = {
    "worker-default-def": "as `worker-default`, with a `def` task, which runs in threads",
    "queue-add-iterator": "one bulk add of 200,000 jobs from an iterator",
    "queue-add-delayed-concurrent": "10,000 delayed adds started at once",
    "worker-concurrent-events": "concurrency 100, events on",
    "worker-concurrent-results": "concurrency 100, results stored",
    "worker-many-queues": "as `worker-concurrent`, with the jobs spread over 100 queues of one worker",
    "worker-sync": "`def` handlers, in threads",
}
#: Rows of the README's tables: default settings, each with its text; then the engine API.
DEFAULTS_IN_README = {
    "worker-default": "run a task, write its events, store its result",
    "worker-default-def": "the same with a `def` task, in threads",
    "round-trip": "add a task and await its result, one caller",
    "round-trip-100": "the same with 100 callers",
}
MEMORY_IN_README = "server memory of a waiting / finished / delayed job with a payload of 100 bytes"
ENGINE_IN_README = (
    "queue-add",
    "queue-add-bulk-1000",
    "queue-add-delayed",
    "worker-concurrent",
    "worker-delayed-end-to-end",
    "worker-retry-throughput",
)
LIMITS = ("redis-benchmark", "bare loop")
LATENCY_TEXT = (
    "Milliseconds from the time a job should have been added to the start of its handler. The load is open-loop: a job "
    "that is added late counts from when it was due, so stalls count in full (no coordinated omission). "
    "Producer and worker share one process."
)


ROUND_TRIP_TEXT = (
    "Milliseconds to add a job and receive its result, with an idle worker. tampu, chasquimq, arq, SAQ and BullMQ run "
    "client and worker in one process, Celery, Dramatiq and taskiq in several. PING: the median time of a PING over "
    "the same connection."
)


COLD_START_TEXT = (
    "Milliseconds from starting a worker program until it has run its first job, which is already waiting, and the CPU "
    "time that the program uses until then. tampu, Celery, Dramatiq, arq, SAQ and taskiq are started from their "
    "command lines, with one process and default settings; chasquimq, BullMQ and `tampu, program` are programs "
    "that run a worker."
)


def publish(record: Record) -> None:
    """Write everything that is generated from a run."""
    for folder in (PLOTS, PUBLISHED.parent):
        folder.mkdir(parents=True, exist_ok=True)
    record.save(PUBLISHED)
    for name, svg in plots(record).items():
        (PLOTS / f"{name}.svg").write_text(svg)
    PAGE.write_text(page(record))
    README.write_text(with_blocks(README.read_text(), record))


def with_blocks(text: str, record: Record) -> str:
    """Return the README with its blocks replaced. A block for which the run has no figures stays as it is."""
    for name, block in (("defaults", readme_defaults(record)), ("engine", readme_engine(record))):
        begin, end = (mark.format(name=name) for mark in BLOCK)
        if begin not in text or end not in text:
            print(f"bench: README.md has no {begin} ... {end}: its table was not updated")
        elif block:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


# --- the page


def page(record: Record) -> str:
    parts = [
        "# Benchmarks",
        "*Generated by `make bench`, which runs all benchmarks (about 15 minutes) and saves every sample in "
        "`build/bench/published.json`; do not edit. "
        "`make bench-report` generates the page again, `make bench-quick` measures only the targets (about 4 minutes), "
        "and `tampu bench` measures your own server.*",
        how(record),
        _section(
            "Throughput",
            main_table(record),
            "Jobs per second, medians. In parentheses: tampu's throughput divided by theirs; below 1, the peer is "
            "faster. A dash means that the peer has no such call.",
            "\n".join(f"- `{name}`: {text}" for name, text in MAIN.items() if name in record.scenarios()),
            *(f"![{name}](benchmarks/{name}.svg)" for name in MAIN if name in record.scenarios()),
        ),
        _section("Where a peer is faster", faster_peers(record)),
        _section("Upper bound", limit_table(record), limit_text(record)),
        _section("Other scenarios", pair_table(record, OURS_ONLY)),
        _section("Payload size", payload_table(record), "Jobs per second by payload size."),
        _section("Pickup latency", latency_table(record), LATENCY_TEXT),
        _section("Round trips", round_trip_table(record), ROUND_TRIP_TEXT),
        _section("Cold start", cold_start_table(record), COLD_START_TEXT),
        _section(
            "CPU per job",
            cpu_table(record),
            "Microseconds of CPU time per job, as counted by the kernel, including worker processes.",
        ),
        _section(
            "Worker processes",
            process_table(record),
            "![processes](benchmarks/processes.svg)",
        ),
        _section("Memory", memory_text(record)),
        _section("Server memory", server_memory_table(record), "Bytes of server memory per job."),
        _section(
            "RSMQ", rsmq_table(record), "Messages per second, one client; clients take turns, 150 messages at a time."
        ),
        _section("Spark", spark_table(record), "Rows, events or jobs per second; a warm session of `local[2,4]`."),
        _section(
            "Targets", bar_table(record), "Ratios of medians that must hold; `make bench-quick` checks most of them."
        ),
        _section("Versions and settings", settings_table(record)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, main: str, *more: str) -> str:
    """Return an empty string if the run has no figures for the section."""
    return "\n\n".join([f"## {title}", main, *more]) if main else ""


def how(record: Record) -> str:
    machine = record.machine
    return (
        f"Measured {record.at[:10]} on {machine['cores']} cores ({machine['cpu']}, {machine['memory_gb']} GB, "
        f"{machine['system']}), Python {machine['python']}, {record.server} without persistence on the same machine. "
        "Compare figures within one run only.\n\n"
        f"- **Rounds**: {record.rounds} rounds (peers other than chasquimq in the first {OTHERS_ROUNDS}). In each "
        "round every contestant runs every scenario, in rotating order, on an empty server. The tables show "
        "medians.\n"
        "- **Jobs**: payloads of about 100 bytes, handlers that do nothing.\n"
        "- **Peers**: each runs in its own environment with the settings its authors recommend for throughput, "
        "[listed below](#versions-and-settings).\n"
        "- **tampu**: `worker-default` and `round-trip` are what applications get: `@queue.task` and `Worker(queue)` "
        "with default settings, which write events and store results. All others use the engine API (`Producer`, "
        "`Consumer`) with uvloop, results not stored, events off unless the scenario's name says otherwise. There, "
        "workers read 256 jobs at a time (`batch=256`, the default), in `worker-generic` and `tampu, batch 64` only "
        "64.\n"
        "- **Timing**: worker programs are timed from their first job, so their start-up does not count; tampu, "
        "chasquimq, arq, SAQ, streaQ and BullMQ from the worker's start, including connecting."
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
    rows = [["scenario", "upper bound", "jobs/s", "tampu", "share"]]
    for scenario in record.scenarios():
        for limit in LIMITS:
            theirs, ours = record.median(scenario, limit), record.median(scenario, "tampu")
            if theirs and ours:
                rows.append([f"`{scenario}`", limit, _number(theirs), _number(ours), f"{ours / theirs:.0%}"])
    return _table(rows) if len(rows) > 1 else ""


def limit_text(record: Record) -> str:
    text = (
        "`redis-benchmark` sends the same XADD from C over one connection, 1, 50 or 1,000 at a time. The bare loop "
        "calls XREADGROUP and XACKDEL (or XADD) on a blocking socket with hiredis, without decoding, handlers "
        "or leases."
    )
    add, ping = (record.median("one-add-beside-one-ping", "tampu", figure) for figure in ("add_us", "ping_us"))
    if add and ping:
        text += (
            f" One add takes {add:.0f} µs; one PING over the same connection takes {ping:.0f} µs "
            f"(a ratio of {add / ping:.2f}; a hundred of each, alternating)."
        )
    return text


def faster_peers(record: Record) -> str:
    """Return a list of the scenarios in which a peer has the higher median."""
    lines = []
    for scenario in record.scenarios():
        ours = record.median(scenario, "tampu")
        for name in record.contestants_of(scenario) if ours else ():
            theirs = None if name.startswith("tampu") or name in LIMITS else record.median(scenario, name)
            if ours and theirs and theirs > ours:
                lines.append(f"- `{scenario}`: {name} {_number(theirs)} jobs/s, tampu {_number(ours)}")
    return "\n".join(lines)


def pair_table(record: Record, scenarios: dict[str, str]) -> str:
    rows = [["scenario", "", "tampu", "chasquimq", "ratio"]]
    for name, text in scenarios.items():
        ours, theirs = record.median(name, "tampu"), record.median(name, "chasquimq")
        if ours:
            rows.append([f"`{name}`", text, *_pair(ours, theirs)])
    return _table(rows) if len(rows) > 1 else ""


def payload_table(record: Record) -> str:
    rows = [["payload", "add_bulk(50), tampu", "chasquimq", "ratio", "run, tampu", "chasquimq", "ratio"]]
    for size in ("100 B", "1 KB", "10 KB", "100 KB", "1 MB"):
        row = [size]
        for what in ("add", "work"):
            ours = record.median(f"payload-{what} {size}", "tampu")
            if ours is None:
                break
            row += _pair(ours, record.median(f"payload-{what} {size}", "chasquimq"))
        if len(row) == len(rows[0]):
            rows.append(row)
    return _table(rows) if len(rows) > 1 else ""


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


def round_trip_table(record: Record) -> str:
    figures = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    rows = [["callers", "", *(figure.removesuffix("_ms") for figure in figures), "PING"]]
    for scenario, callers in (("round-trip", "1"), ("round-trip-100", "100")):
        for name in record.contestants_of(scenario):
            found = [record.median(scenario, name, figure) for figure in figures]
            ping = record.median(scenario, name, "ping_ms")
            if found[0] is not None:
                rows.append([callers, name, *(f"{value:.2f}" for value in found if value is not None)])
                rows[-1].append("" if ping is None else f"{ping:.3f}")
    return _table(rows) if len(rows) > 1 else ""


def cold_start_table(record: Record) -> str:
    rows = [["", "first job", "CPU"]]
    for name in record.contestants_of("cold-start"):
        found = [record.median("cold-start", name, figure) for figure in ("first_job_ms", "cpu_ms")]
        if found[0] is not None:
            rows.append([name, *(f"{value:,.0f}" for value in found if value is not None)])
    return _table(rows) if len(rows) > 1 else ""


def cpu_table(record: Record) -> str:
    wanted = ("worker-default", "queue-add-bulk-50", "queue-add", "worker-concurrent")
    scenarios = [name for name in wanted if name in record.scenarios()]
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
    return "One queue, `worker-concurrent` in each process. The server and the workers share the cores.\n\n" + _table(
        rows
    )


def memory_text(record: Record) -> str:
    per_job, worker, producer = (
        record.median("memory", "tampu", figure) for figure in ("server_bytes_per_job", "worker_mb", "producer_mb")
    )
    if per_job is None:
        return ""
    text = (
        f"With 1,000,000 waiting jobs the server uses {per_job:.0f} bytes per job; a worker on that queue uses at most "
        f"{worker:.0f} MB (resident)."
    )
    if producer is not None:
        text += f" The producer that added them from a generator used {producer:.0f} MB, including their ids."
    return text


def server_memory_table(record: Record) -> str:
    figures = ("waiting_bytes", "delayed_bytes", "finished_bytes")
    rows = [["payload", "", "waiting", "delayed", "finished, with a result"]]
    for size in ("100 B", "1 KB"):
        for name in record.contestants_of(f"server-memory {size}"):
            found = [record.median(f"server-memory {size}", name, figure) for figure in figures]
            if found[0] is not None:
                rows.append([size, name, *(f"{value:,.0f}" for value in found if value is not None)])
    return _table(rows) if len(rows) > 1 else ""


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
    rows = [["target", "ratio", "required", ""]]
    for bar in record.bars:
        sign = "at most" if bar["is_at_most"] else "at least"
        holds = "ok" if bar["holds"] else "**missed**"
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


def readme_defaults(record: Record) -> str:
    """Return the figures with default settings next to chasquimq's, the better ones bold; "" if the run has none."""
    rows = [["", "tampu", "chasquimq 1.3.0 (Rust)"]]
    for scenario, text in DEFAULTS_IN_README.items():
        is_delay = scenario == "round-trip"
        figure = "p50_ms" if is_delay else "rate"
        ours, theirs = (record.median(scenario, name, figure) for name in ("tampu", "chasquimq"))
        if ours is None:
            continue
        cells = [_default_cell(record, scenario, name) for name in ("tampu", "chasquimq")]
        is_won = theirs is None or (ours <= theirs if is_delay else ours >= theirs)
        rows.append([f"`{scenario}`: {text}", *_bold(cells, 0 if is_won else 1)])
    if len(rows) == 1:
        return ""
    figures = ("waiting_bytes", "finished_bytes", "delayed_bytes")
    memory = [
        [value for figure in figures if (value := record.median("server-memory 100 B", name, figure)) is not None]
        for name in ("tampu", "chasquimq")
    ]
    if all(len(values) == len(figures) for values in memory):
        cells = [" / ".join(f"{value:,.0f}" for value in values) + " bytes" for values in memory]
        wins = {mine <= theirs for mine, theirs in zip(*memory, strict=True)}
        rows.append([MEMORY_IN_README, *(_bold(cells, 0 if wins == {True} else 1) if len(wins) == 1 else cells)])
    return (
        "With default settings (`@queue.task` and `Worker(queue)`); both libraries write events and store results:\n\n"
        f"{_table(rows)}\n\nCPU time is per job, client and server combined; in parentheses: tampu's throughput "
        f"divided by chasquimq's. {record.machine['cores']} cores, {record.server}, medians of {record.rounds} "
        f"interleaved rounds, {record.at[:10]}."
    )


def _default_cell(record: Record, scenario: str, name: str) -> str:
    """Return the main figure of a scenario, then a comma and another one."""

    def ms(figure: str) -> str:
        value = record.median(scenario, name, figure) or 0.0
        return f"{figure.removesuffix('_ms')} {value:.{1 if value < 10 else 0}f} ms"

    rate, ours = record.median(scenario, name), record.median(scenario, "tampu")
    if scenario == "round-trip":
        return f"{ms('p50_ms')}, {ms('p99_ms')}" if record.median(scenario, name, "p50_ms") is not None else "-"
    if rate is None:
        return "-"
    main = f"{_number(rate)} jobs/s" + (f" ({ours / rate:.1f})" if ours and name != "tampu" else "")
    if scenario == "round-trip-100":
        return f"{main}, {ms('p99_ms')}"
    cpu = sum(record.median(scenario, name, side) or 0.0 for side in ("client_us", "server_us"))
    return f"{main}, {cpu:.0f} µs" + (" of CPU" if (scenario, name) == ("worker-default", "tampu") else "")


def _bold(cells: list[str], winner: int) -> list[str]:
    """Return the cells with the main figure of one of them, up to the first comma followed by a space, in bold."""
    main, *rest = cells[winner].split(", ", 1)
    cells[winner] = ", ".join([f"**{main}**", *rest])
    return cells


def readme_engine(record: Record) -> str:
    """Return the engine's figures next to those of chasquimq, the fastest other peer and the upper bound.

    The fastest is bold. "" if the run has no such figures.
    """
    rows = [["jobs per second", "tampu", "chasquimq 1.3.0 (Rust)", "fastest other peer", "upper bound"]]
    for scenario in ENGINE_IN_README:
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
        other = f"{_number(others[best])} ({best}, {ours / others[best]:.1f})" if best else "-"
        won = best is None or ours >= others[best]
        limit = next((name for name in LIMITS if record.median(scenario, name)), None)
        rows.append(
            [
                f"`{scenario}`",
                f"**{_number(ours)}**" if won else _number(ours),
                _cell(record, scenario, "chasquimq"),
                other if won else f"**{other}**",
                f"{_number(record.median(scenario, limit) or 0)} ({limit})" if limit else "",
            ]
        )
    if len(rows) == 1:
        return ""
    latency = record.median("latency-1000", "tampu", "p99_ms")
    tail = f" Pickup latency at 1,000 jobs/s: p99 {latency:.1f} ms." if latency else ""
    missing = [name for name, about in record.contestants.items() if "unavailable" in about]
    if missing:
        tail += f" Could not be installed for this run: {', '.join(missing)}."
    return (
        f"The engine API with tuned settings:\n\n{_table(rows)}\n\n"
        "In parentheses: tampu's throughput divided by theirs. Settings: the engine API with uvloop, results not "
        "stored, events off. "
        f"{record.machine['cores']} cores, {record.server}, medians of {record.rounds} interleaved rounds "
        f"(peers other than chasquimq: {OTHERS_ROUNDS}), {record.at[:10]}.{tail} "
        "[All figures, including where peers are faster](docs/benchmarks.md); `make bench` reproduces them."
    )


# --- plots


#: Follows the light or dark theme of the reader's system.
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
        drawn["processes"] = _svg_file(chart, "tampu, by number of processes")
    return drawn


def _svg_file(chart: Chart, subtitle: str) -> str:
    title, top = escape(chart.title), 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {chart.height + top}" width="{WIDTH}" '
        f'role="img" aria-label="{title}">{PLOT_STYLE}\n<text x="12" y="22" class="title">{title}</text>\n'
        f'<text x="12" y="40">{escape(subtitle)}</text>\n<g transform="translate(0 {top})">{chart.elements}</g></svg>\n'
    )


def _everybody(record: Record, scenarios: list[str]) -> list[str]:
    """Return the names in the order of the contestants, tampu's first."""
    found = dict.fromkeys(name for scenario in scenarios for name in record.contestants_of(scenario))
    ours = [name for name in found if name.startswith("tampu")]
    listed = [name for name in record.contestants if name in found and name not in ours]
    return [*ours, *listed, *(name for name in found if name not in ours and name not in listed)]


def _pair(ours: float, theirs: float | None) -> list[str]:
    return [_number(ours), _number(theirs) if theirs else "-", f"{ours / theirs:.1f}" if theirs else ""]


def _number(value: float) -> str:
    """Round to three digits: a benchmark has no more precision."""
    if value >= 1000:
        digits = len(str(int(value)))
        value = round(value, 3 - digits)
    return f"{value:,.0f}"


def _table(rows: list[list[str]]) -> str:
    head, *rest = rows
    is_number = [all(re.match(r"[*\d(-]|$|failed|p50 ", row[column]) for row in rest) for column in range(len(head))]
    rule = ["---:" if number else "---" for number in is_number]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rest])
