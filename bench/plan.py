"""Which contestant runs which scenario, with how many jobs. One run of a measure should take about a second."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.limit import redis_benchmark
from bench.runner import Measure

if TYPE_CHECKING:
    from bench.contestants import Program

#: Peers of the full run, as named in `scripts/install_peers.py`. BullMQ is native to Node.
PEERS = ("chasquimq", "bullmq", "bullmq-node", "celery", "dramatiq", "rq", "arq", "saq", "taskiq", "huey", "streaq")
#: Number of rounds in which the other peers take part: most are slow, and far from any target.
OTHERS_ROUNDS = 3
#: Payload sizes besides the usual 100 bytes, and the number of jobs for each.
PAYLOADS = {"1 KB": (1_000, 20_000), "10 KB": (10_000, 4_000), "100 KB": (100_000, 500), "1 MB": (1_000_000, 100)}
#: Sizes in a quick run.
QUICK_PAYLOADS = ("1 KB", "10 KB", "100 KB", "1 MB")
#: Jobs per second for pickup latency.
RATES = (100, 1000, 5000)


#: RSMQ peers, and their labels in the tables.
RSMQ_PEERS = ("rsmq", "pyrsmq")
LABELS = {"rsmq": "rsmq (npm)", "pyrsmq": "PyRSMQ"}


@dataclass(frozen=True)
class Scenario:
    """A scenario, with the name used by the original if it has one."""

    name: str
    #: Scenario name and arguments for the program.
    ask: str
    arguments: dict[str, Any]
    #: Number of jobs for tampu, for chasquimq, and for the others.
    ours: int
    chasquimq: int = 0
    others: int = 0
    #: Additional arguments for tampu.
    our_arguments: dict[str, Any] | None = None

    def total_of(self, contestant: str) -> int:
        if contestant in ("tampu", "bare loop"):
            return self.ours
        return self.chasquimq if contestant == "chasquimq" else self.others


#: The worker scenarios read 256 entries at a time, as workers do by default; 64, the default of 0.1, is measured too.
WIDE = {"batch": 256}

#: Default settings: what applications get.
DEFAULTS = [
    Scenario("worker-default", "worker-default", {}, 30_000, 10_000),
    Scenario("worker-default-def", "worker-default", {}, 20_000, our_arguments={"kind": "def"}),
    Scenario("round-trip", "round-trip", {"callers": 1}, 1_000, 300, 300),
    Scenario("round-trip-100", "round-trip", {"callers": 100}, 5_000, 2_000, 2_000),
    Scenario("one-task-add-beside-one-ping", "one-task-add-beside-one-ping", {}, 3_000),
]
ADDING = [
    Scenario("queue-add", "queue-add", {}, 3_000, 2_000, 1_000),
    Scenario("queue-add-bulk-50", "queue-add-bulk", {"size": 50}, 20_000, 10_000, 5_000),
    Scenario("queue-add-bulk-1000", "queue-add-bulk", {"size": 1000}, 50_000, 20_000, 5_000),
    Scenario("queue-add-iterator", "queue-add-iterator", {}, 200_000),
    Scenario("queue-add-concurrent", "queue-add-concurrent", {}, 10_000, 10_000, 2_000),
    Scenario("queue-add-delayed", "queue-add-delayed", {}, 3_000, 2_000, 1_000),
    Scenario("queue-add-delayed-concurrent", "queue-add-delayed-concurrent", {}, 10_000, 5_000),
    Scenario("one-add-beside-one-ping", "one-add-beside-one-ping", {}, 3_000),
]
WORKING = [
    Scenario("worker-generic", "worker", {"concurrency": 1}, 20_000, 2_000, 500),
    Scenario("worker-concurrent", "worker", {"concurrency": 100}, 100_000, 20_000, 2_000, our_arguments=WIDE),
    Scenario("worker-concurrent-events", "worker", {"events": True}, 50_000, 20_000, our_arguments=WIDE),
    Scenario("worker-concurrent-results", "worker", {"results": True}, 50_000, 10_000, our_arguments=WIDE),
    Scenario("worker-many-queues", "worker-many", {}, 100_000),
    Scenario("worker-sync", "worker", {"kind": "sync"}, 20_000, our_arguments=WIDE),
    Scenario("worker-delayed-end-to-end", "worker-delayed", {}, 20_000, 5_000, 1_000, our_arguments=WIDE),
    Scenario("worker-retry-throughput", "worker-retry", {}, 20_000, 5_000, 500, our_arguments=WIDE),
]
#: Factors for peers that would take far longer than a second with the usual number of jobs.
SLOWER = {"rq": 0.2, "celery": 0.5}
SCENARIOS = [*DEFAULTS, *ADDING, *WORKING]
#: Scenarios that the targets of a quick run need.
QUICK = {
    *(scenario.name for scenario in DEFAULTS),
    "queue-add-bulk-50",
    "queue-add-bulk-1000",
    "queue-add-iterator",
    "queue-add-concurrent",
    "one-add-beside-one-ping",
    "worker-concurrent",
    "worker-concurrent-events",
    "worker-delayed-end-to-end",
    "worker-retry-throughput",
}


def asked(program: Program, scenario: Scenario, label: str | None = None, **more: Any) -> Measure | None:
    """Return the measure of a program in a scenario, or None if it does not have the scenario."""
    total = scenario.total_of(program.name)
    if scenario.ask not in program.about["scenarios"] or not total:
        return None
    total = max(int(total * SLOWER.get(program.name, 1)), 50)
    arguments = {**scenario.arguments, "total": total}
    if program.name == "tampu":
        arguments |= scenario.our_arguments or {}
    elif program.name == "bare loop":
        arguments = {"total": total}
    arguments |= more
    run = partial(program.ask, scenario.ask, **arguments)
    rounds = OTHERS_ROUNDS if program.name in PEERS[1:] else Measure.rounds
    return Measure(scenario.name, label or program.name, run, arguments, rounds)


def core(programs: list[Program], server: Any, scenarios: list[Scenario]) -> list[Measure]:
    """Return all programs in these scenarios, and the limit."""
    measures: list[Measure] = []
    for scenario in scenarios:
        found = [asked(program, scenario) for program in programs]
        measures += [measure for measure in found if measure]
        if scenario.name in ("queue-add-bulk-50", "queue-add-bulk-1000", "queue-add"):
            depth = scenario.arguments.get("size", 1)
            total = 100_000 if depth == 50 else 200_000 if depth == 1000 else 10_000
            limit = partial(redis_benchmark.adding, server, depth, total)
            measures.append(Measure(scenario.name, "redis-benchmark", limit, {"depth": depth, "total": total}))
    ours = next(program for program in programs if program.name == "tampu")
    if any(scenario.name == "worker-concurrent" for scenario in scenarios):
        concurrent = next(scenario for scenario in WORKING if scenario.name == "worker-concurrent")
        measures.append(_sure(asked(ours, concurrent, "tampu, batch 64", batch=64)))
    # The bare loop only reads and acknowledges, so it does not limit other kinds of work.
    return [
        measure
        for measure in measures
        if measure.contestant != "bare loop" or measure.scenario in ("worker-concurrent", "queue-add")
    ]


def payloads(programs: list[Program], sizes: tuple[str, ...] = ("100 B", *PAYLOADS)) -> list[Measure]:
    """Return measures of adding in bulk and running, by payload size."""
    measures = []
    for program in programs:
        if program.name not in ("tampu", "chasquimq"):
            continue
        for size in sizes:
            payload_bytes, total = {"100 B": (100, 50_000), **PAYLOADS}[size]
            jobs = max(total // (1 if program.name == "tampu" else 4), 50)
            for name, ask, more in (
                (f"payload-add {size}", "queue-add-bulk", {"size": 50}),
                (f"payload-work {size}", "worker", WIDE if program.name == "tampu" else {}),
            ):
                arguments = {"total": jobs, "payload_bytes": payload_bytes, **more}
                measures.append(Measure(name, program.name, partial(program.ask, ask, **arguments), arguments))
    return measures


def latencies(
    programs: list[Program], rates: tuple[int, ...] = RATES, seconds: float = 3.0, rounds: int = 3
) -> list[Measure]:
    """Return measures of pickup latency at fixed rates."""
    return [
        Measure(
            f"latency-{rate}",
            program.name,
            partial(program.ask, "pickup-latency", rate=rate, seconds=seconds),
            {"rate": rate, "seconds": seconds},
            rounds,
        )
        for rate in rates
        for program in programs
        if "pickup-latency" in program.about["scenarios"]
    ]


def processes(ours: Program, total: int = 200_000) -> list[Measure]:
    """Return measures of 1 to 4 worker processes on one queue."""
    return [
        Measure(
            f"processes-{count}",
            "tampu",
            partial(ours.ask, "worker-processes", total=total, processes=count),
            {"total": total, "processes": count, "batch": 256},
            3,
        )
        for count in (1, 2, 3, 4)
    ]


def memory(ours: Program, total: int = 1_000_000) -> list[Measure]:
    """Return the measure of memory with a million waiting jobs."""
    return [Measure("memory", "tampu", partial(ours.ask, "memory", total=total), {"total": total}, 1)]


def server_memory(programs: list[Program], total: int = 10_000) -> list[Measure]:
    """Return the measures of the server's memory per job, by payload size; one round is enough."""
    return [
        Measure(
            f"server-memory {size}",
            program.name,
            partial(program.ask, "server-memory", total=total, payload_bytes=payload_bytes),
            {"total": total, "payload_bytes": payload_bytes},
            1,
        )
        for size, payload_bytes in (("100 B", 0), ("1 KB", 1000))
        for program in programs
        if "server-memory" in program.about["scenarios"]
    ]


def cold_starts(programs: list[Program]) -> list[Measure]:
    """Return the measures from the start of a worker program until its first job has run."""
    measures = []
    for program in programs:
        if "cold-start" in program.about["scenarios"]:
            hows: dict[str, dict[str, str]] = {program.name: {}}
            if program.name == "tampu":
                hows["tampu, program"] = {"how": "program"}
            for label, more in hows.items():
                run = partial(program.ask, "cold-start", **more)
                measures.append(Measure("cold-start", label, run, more))
    return measures


def rsmq(programs: list[Program], messages: int = 150, slices: int = 10, rounds: int = 5) -> list[Measure]:
    """Return RSMQ measures: contestants alternate in short slices, so that a busy moment affects all."""
    many = max(messages * 20 // 100, 1) * 100
    measures = []
    for what in ("rsmq-send", "rsmq-receive-delete"):
        runs: dict[str, tuple[Program, dict[str, Any]]] = {}
        for program in programs:
            if program.name == "tampu":
                runs["tampu"] = (program, {"total": messages})
                for how in ("100 callers", "batches"):
                    runs[f"tampu, {how}"] = (program, {"total": many, "how": how})
            elif what in program.about["scenarios"]:
                runs[LABELS[program.name]] = (program, {"total": messages})
        measures.append(
            Measure(what, "", partial(_in_slices, what, runs, slices), {"slices": slices, "total": messages}, rounds)
        )
    return measures


def _in_slices(what: str, runs: dict[str, tuple[Program, dict[str, Any]]], slices: int) -> dict[str, dict[str, float]]:
    seconds = dict.fromkeys(runs, 0.0)
    for _ in range(slices):
        for name, (program, arguments) in runs.items():
            seconds[name] += arguments["total"] / program.ask(what, **arguments)["rate"]
    return {name: {"rate": slices * runs[name][1]["total"] / seconds[name]} for name in runs}


def _sure(measure: Measure | None) -> Measure:
    assert measure is not None
    return measure
