"""One run: start everything, inject faults, heal, drain, collect what is on the server, check and report."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.checker import Violation, check, story
from chaos.failovers import FailoverWatch
from chaos.faults import FAULTS, LANES, Lab
from chaos.fleet import Fleet
from chaos.hits import Hits, count_hits
from chaos.records import Recorder, read_history
from chaos.servers import persistent_server
from chaos.wire import Wire
from servers.cluster import Cluster
from servers.require import require_server
from servers.sentinel import SentinelSetup
from tampu import Queue
from tampu.errors import Error
from tampu.wire import decode_delayed_member, decode_dlq_fields, decode_result
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_job
from tampu.wire.keys import QueueKeys
from tampu.wire.repeat import MissedFiresPolicy, RepeatableSpec, RepeatPattern
from tampu.wire.ulid import decode_ulid_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chaos.records import History
    from tampu.redis.client import Client

QUEUE = "q"
KEYS = QueueKeys(QUEUE)
#: How late schedules may fire at the end of a run, in seconds.
FIRE_SECS = 10.0


@dataclass
class Setup:
    """The settings of a run."""

    #: "single", "sentinel" or "cluster".
    topology: str = "single"
    seed: int = 1
    #: Number of jobs to confirm, and how long they are added, in seconds.
    jobs: int = 100_000
    seconds: float = 300.0
    workers: int = 4
    #: Number of workers that are chasquimq's, and the Python that runs them.
    peers: int = 0
    peer_python: str = ""
    #: How many runs beyond its attempts a job that kills its workers may have.
    extra_runs: int = 3
    producers: int = 2
    concurrency: int = 40
    lease_secs: float = 4.0
    schedules: int = 3
    #: Schedules that cannot be fired, which must not delay the others; more than a scheduler reads at once.
    broken_schedules: int = 300
    #: Schedules also fire what fell due while no scheduler ran; otherwise only what a dead leader has missed.
    fires_all: bool = True
    #: Pause between two faults of a lane, in seconds: random, up to twice this.
    pause_secs: float = 1.5
    #: Kinds of faults; all of the topology's by default.
    kinds: tuple[str, ...] | None = None
    #: Handlers that misbehave, by the first word of what they do; all by default.
    rare: tuple[str, ...] | None = None
    #: Interval at which each producer adds one of them, in seconds. Replacing a process that one ends takes a second.
    rare_secs: float = 1.5
    #: Interval at which each producer adds a long job, so that every fault finds jobs in flight, in seconds.
    long_secs: float = 0.1
    #: Add jobs that kill one worker after another until they are dead-lettered, which takes a while.
    poison: bool = True
    #: How often each fault is injected; None: as often as the time allows.
    cycles: int | None = None
    #: How long the queue may take to drain after the last fault, in seconds.
    drain_secs: float = 180.0


@dataclass
class Report:
    """The result of a run."""

    setup: Setup
    seconds: float = 0.0
    confirmed: int = 0
    runs: int = 0
    reruns: int = 0
    dead_letters: int = 0
    #: Fires that were due by the server's clock, and those that ran.
    fires_due: int = 0
    fires: int = 0
    #: Jobs that were cancelled at once, and jobs whose worker was asked to cancel them.
    cancelled: int = 0
    requested: int = 0
    hits: dict[str, Hits] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    #: Processes that ended unexpectedly.
    unexpected: list[str] = field(default_factory=list)
    #: Everything that is known about the jobs of the first violations.
    stories: list[str] = field(default_factory=list)
    history: History | None = None

    @property
    def is_clean(self) -> bool:
        return not self.violations and not self.unexpected

    def kinds_missed(self, least: int) -> list[str]:
        """Return the kinds of faults that hit a job in flight fewer than `least` times."""
        wanted = [kind for _, kinds in _lanes(self.setup) for kind in kinds]
        return [kind for kind in wanted if self.hits.get(kind, Hits()).hit < least]

    def lines(self) -> Iterator[str]:
        setup = self.setup
        yield (
            f"{setup.topology}, seed {setup.seed}: {self.confirmed:,} jobs confirmed, {self.runs:,} runs of which "
            f"{self.reruns:,} after a cause, {self.dead_letters:,} dead letters, "
            f"{self.fires:,} of {self.fires_due:,} fires, "
            f"{self.cancelled:,} cancels and {self.requested:,} requests, {self.seconds:.0f} s"
        )
        yield f"  {'fault':15} {'injected':>8} {'hit':>6} {'jobs in flight':>15}"
        for kind, hits in sorted(self.hits.items()):
            yield f"  {kind:15} {hits.injected:8,} {hits.hit:6,} {hits.jobs:15,}"
        for line in self.unexpected[:10]:
            yield f"  UNEXPECTED {line}"
        for violation in self.violations[:20]:
            yield f"  VIOLATION {violation}"
        if len(self.violations) > 20:
            yield f"  ... and {len(self.violations) - 20} more violations"
        yield from self.stories
        yield f"  {len(self.violations)} violations"

    def as_json(self) -> str:
        """Return the figures, for the page on reliability."""
        figures = asdict(replace(self, history=None))
        figures["violations"] = [str(violation) for violation in self.violations]
        return json.dumps(figures)


async def run(setup: Setup, folder: Path, say: Callable[[str], None] = lambda line: None) -> Report:
    """Run once and return the report."""
    began = time.monotonic()
    records_folder = folder / "records"
    records_folder.mkdir(parents=True)
    records = Recorder(records_folder, "injector")
    fleet = Fleet(folder, records)
    rng = random.Random(setup.seed)
    report = Report(setup)
    async with contextlib.AsyncExitStack() as stack:
        lab, url = await _open_lab(setup, folder, fleet, records, rng, stack)
        stack.callback(fleet.kill_all)
        queue = await stack.enter_async_context(Queue(QUEUE, url=url))
        specs = await _start_schedules(queue, setup)
        _start_fleet(setup, fleet, lab, url)
        watching = asyncio.create_task(fleet.watch())
        enough = asyncio.Event()
        injecting = [asyncio.create_task(_inject(lab, *lane, setup, enough)) for lane in _lanes(setup)]
        say(f"{setup.topology}: running, seed {setup.seed}")
        await _until_added(fleet, setup, injecting)
        enough.set()  # a fault that has begun is completed
        for outcome in await asyncio.gather(*injecting, return_exceptions=True):
            if isinstance(outcome, Exception):
                report.unexpected.append(f"the injector: {outcome!r}")
        await _heal(lab)
        await fleet.stop_producers(30)
        await _stop_schedules(queue, records, specs)
        say(f"{setup.topology}: draining")
        await drain(queue, setup.drain_secs)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.stop_workers(40)
        await collect(queue, records)
        say(f"{setup.topology}: checking")
        report.unexpected += fleet.unexpected
        report.history = history = read_history(records_folder, setup.lease_secs)
        history.extra_runs = setup.extra_runs
        if not setup.fires_all:
            _begin_with_the_first_fire(history)
    judge(report, history)
    report.seconds = time.monotonic() - began
    return report


def _begin_with_the_first_fire(history: History) -> None:
    """Ignore due times before the first worker ran: the policy drops them."""
    for schedule in history.schedules:
        fired = (token.partition("@") for token in history.runs)
        schedule.first = min(int(due) for spec, _, due in fired if spec == schedule.spec)


def judge(report: Report, history: History) -> None:
    """Check a history and fill in the report."""
    report.violations = check(history)
    report.hits = count_hits(history)
    report.confirmed = sum(asked.answer in ("ok", "known") for asked in history.asked.values())
    report.runs = sum(len(runs) for runs in history.runs.values())
    report.reruns = sum(
        len(runs) - len({run.attempt for run in runs}) for runs in history.runs.values() if len(runs) > 1
    )
    report.dead_letters = sum(len(letters) for letters in history.dead.values())
    report.fires = sum("@" in token for token in history.runs)
    report.fires_due = sum(len(schedule.due_times) for schedule in history.schedules)
    report.cancelled, report.requested = len(history.cancelled), len(history.requested)
    for violation in report.violations[:3]:
        report.stories += [f"  the story of {violation.token}:"]
        report.stories += [f"    {line}" for line in story(history, violation.token)]


# --- starting


def _lanes(setup: Setup) -> list[tuple[float, list[str]]]:
    lanes = [
        (slowness, [kind for kind in kinds if setup.kinds is None or kind in setup.kinds])
        for slowness, kinds in LANES[setup.topology]
    ]
    return [(slowness, kinds) for slowness, kinds in lanes if kinds]


async def _open_lab(
    setup: Setup, folder: Path, fleet: Fleet, records: Recorder, rng: random.Random, stack: contextlib.AsyncExitStack
) -> tuple[Lab, str]:
    common: dict[str, Any] = {"fleet": fleet, "records": records, "rng": rng, "lease_secs": setup.lease_secs}
    if setup.topology == "sentinel":
        sentinel = SentinelSetup(Path(require_server("redis86")), folder / "sentinel", 1)
        stack.callback(sentinel.stop)
        await asyncio.to_thread(sentinel.start)
        watch = FailoverWatch(sentinel.master, sentinel.replica, records)
        stack.callback(watch.stop)
        watch.start()
        return Lab(**common, sentinel=sentinel, failover_watch=watch), sentinel.url
    if setup.topology == "cluster":
        cluster = Cluster("cluster86", Path(require_server("cluster86")), folder / "cluster")
        stack.callback(cluster.stop)
        await asyncio.to_thread(cluster.start)
        return Lab(**common, cluster=cluster, queue_key=KEYS.stream), cluster.url
    server = persistent_server(Path(require_server("redis86")), folder / "server")
    stack.callback(server.stop)
    await asyncio.to_thread(server.start)
    # Half of the workers and half of the producers connect through their own proxy.
    places = [*range(0, setup.workers, 2), *range(setup.workers, setup.workers + setup.producers, 2)]
    wires = {place: await stack.enter_async_context(Wire(server.address)) for place in places}
    return Lab(**common, server=server, wires=wires), server.url


def _start_fleet(setup: Setup, fleet: Fleet, lab: Lab, url: str) -> None:
    for place in range(setup.workers + setup.producers):
        wire = lab.wires.get(place)
        plan: dict[str, Any] = {
            "url": wire.url if wire else url,
            "queue": QUEUE,
            "seed": setup.seed,
            # As in a rolling deploy that changes the lease: the first worker's is twice as long.
            "lease_ms": int(setup.lease_secs * (2000 if place == 0 else 1000)),
            "kept_secs": 7 * 86_400,  # the clock jumps
        }
        if place < setup.workers:
            plan |= {"role": "w", "concurrency": setup.concurrency}
            if place < setup.peers:
                fleet.start("chaos.chasquimq_worker", plan | {"python": setup.peer_python})
            else:
                fleet.start("chaos.worker", plan)
        else:
            jobs = setup.jobs // setup.producers
            fleet.start(
                "chaos.producer",
                plan
                | {
                    "role": "p",
                    "jobs": jobs,
                    "seconds": setup.seconds,
                    "began": time.monotonic(),
                    "rare": setup.rare,
                    "rare_secs": setup.rare_secs,
                    "long_secs": setup.long_secs,
                    "poison": setup.poison,
                    "max_stream_len": 20_000,
                    "overflow": ("wait", "reject")[place % 2],
                    "min_replicas": setup.topology == "sentinel",
                },
            )


async def _start_schedules(queue: Queue, setup: Setup) -> dict[str, tuple[int, int]]:
    """Register schedules, before any worker runs. Return the interval and the first due time of each."""
    intervals_ms = {f"schedule-{number}": (1000, 3000, 10_000)[number % 3] for number in range(setup.schedules)}
    for name, interval_ms in intervals_ms.items():
        spec = RepeatableSpec("work", RepeatPattern.every(interval_ms), {"token": name, "do": "ok"}).with_key(name)
        policy = MissedFiresPolicy.fire_all(10_000) if setup.fires_all else MissedFiresPolicy.skip()
        await queue.producer.upsert_repeatable(spec.with_missed_fires(policy))
    found = {meta.key: (intervals_ms[meta.key], meta.next_fire_ms) for meta in await queue.get_repeatable_jobs()}
    client = queue.producer.ready_client()
    for number in range(setup.broken_schedules):
        await client.call("SET", KEYS.repeat_spec(f"broken-{number}"), "of a wrong type")
        await client.call("ZADD", KEYS.repeat, number, f"broken-{number}")
    return found


async def _stop_schedules(queue: Queue, records: Recorder, specs: dict[str, tuple[int, int]]) -> None:
    """Remove the schedules, and record the due times that must have fired: all those by the server's clock."""
    client = queue.producer.ready_client()
    now_ms = await client.server_time_ms()
    give_up_at = time.monotonic() + FIRE_SECS
    for spec, (interval_ms, first) in specs.items():
        following = 0
        while following <= now_ms and time.monotonic() < give_up_at:
            await asyncio.sleep(0.05)
            following = int(float(await client.call("ZSCORE", KEYS.repeat, spec) or 0))
        records.write("schedule", spec, interval_ms, first, max(following, now_ms + 1))
        await queue.remove_repeatable_by_key(spec)


# --- the middle


async def _inject(lab: Lab, slowness: float, kinds: list[str], setup: Setup, enough: asyncio.Event) -> None:
    """Inject the faults of one lane: each kind in turn, in an order that the seed decides."""
    await asyncio.sleep(2.0)  # the fleet starts
    rng = random.Random(f"{setup.seed} {kinds}")  # lanes run in parallel, each with its own sequence
    for _ in itertools.count() if setup.cycles is None else range(setup.cycles):
        order = list(kinds)
        rng.shuffle(order)
        for kind in order:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), rng.uniform(0, 2 * setup.pause_secs * slowness))
            if enough.is_set():
                return
            await FAULTS[kind](lab)


async def _until_added(fleet: Fleet, setup: Setup, injecting: list[asyncio.Task[None]]) -> None:
    deadline = time.monotonic() + setup.seconds * 1.5
    while any(member.is_alive for member in fleet.producers) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        if injecting and all(task.done() for task in injecting):
            return


# --- the end


async def _heal(lab: Lab) -> None:
    """Undo what faults have left behind."""
    for wire in lab.wires.values():
        wire.heal()
    if lab.has_server:
        if not lab.server.is_running:
            await asyncio.to_thread(lab.server.start)
        lab.server.resume()
        await lab.command("CONFIG", "SET", "maxmemory", "0")
        await lab.command("CLIENT", "UNPAUSE")
    for member in lab.fleet.members:
        if member.is_alive:
            member.signal(signal.SIGCONT)


async def drain(queue: Queue, within_secs: float) -> None:
    """Wait until no job is left, for at most `within_secs`."""
    client = queue.producer.ready_client()
    deadline = time.monotonic() + within_secs
    while time.monotonic() < deadline:
        with contextlib.suppress(Error):
            waiting = await client.call("XLEN", KEYS.stream) + await client.call("ZCARD", KEYS.delayed)
            if waiting == 0:
                return
        await asyncio.sleep(0.2)


async def collect(queue: Queue, records: Recorder) -> None:
    """Record what the server holds: dead letters, results, and jobs that should be gone."""
    client = queue.producer.ready_client()
    for _, fields in await _entries(client, KEYS.dlq):
        letter = decode_dlq_fields("", fields)
        runs = -1 if letter.attempts is None else letter.attempts
        records.write("dead", _token(letter.payload), letter.reason or "-", runs, letter.error_type or "-")
    for entry_id, fields in await _entries(client, KEYS.stream):
        envelope, _ = read_job_fields(fields)
        pending = await client.call("XPENDING", KEYS.stream, "default", entry_id, entry_id, 1)
        where = f"stream-pending-{pending[0][1].decode()}" if pending else "stream"
        records.write("left", _token(envelope or b""), where)
    for member in await client.call("ZRANGE", KEYS.delayed, 0, -1):
        records.write("left", _token(decode_delayed_member(member)[1]), "delayed")
    cursor = b"0"
    while True:
        cursor, keys = await client.call("SCAN", cursor, "MATCH", KEYS.result("*"), "COUNT", 1000)
        stored = await client.call("MGET", *keys) if keys else []
        for key, packed in zip(keys, stored, strict=True):
            value = None if packed is None else decode_result(packed)
            if value is not None:
                token, _, job_id = str(value).partition("/")
                records.write("result", token, token if KEYS.result(job_id).encode() == key else "of-another-job")
        if cursor == b"0":
            return


async def _entries(client: Client, stream: str) -> list[tuple[bytes, list[bytes]]]:
    entries: list[tuple[bytes, list[bytes]]] = []
    after = "-"
    while page := await client.call("XRANGE", stream, after, "+", "COUNT", 1000):
        entries += page
        after = f"({page[-1][0].decode()}"
    return entries


def _token(envelope: bytes) -> str:
    job = decode_job(envelope)
    token = str(job.payload["token"])
    return f"{token}@{decode_ulid_time(job.id)}" if token.startswith("schedule-") else token
