"""Random operations on a limited queue, each compared with a simple model in memory.

The scripts read a key instead of the server's clock, so that the model knows the time exactly.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from tampu.redis.gate import FIRST_PAGE
from tampu.redis.scripts import load_script
from tampu.wire.extras import JobExtras, encode_extras
from tampu.wire.keys import QueueKeys
from tampu.wire.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.process import Server

KEYS = QueueKeys("q")
CLOCK = f"{KEYS.tag}:clock"
GROUP = "default"
EARLY_MS = 50
#: Longest time for which a parked key may wait although its task has room, see AGAIN_MS in lib/gate.lua.
AGAIN_MS = 251
STEPS = 250
#: A key of a job, or None for one that counts under its task's name.
JOB_KEYS = ["A", "B", "C", "D", None]
TASKS = ["t", "u"]


@dataclass
class Bound:
    """A limit as the model applies it."""

    most: float = math.inf
    interval: float = 0
    burst: int = 1
    is_ordered: bool = False

    def __post_init__(self) -> None:
        self.most = min(self.most, 1) if self.is_ordered else self.most
        self.tau = (self.burst - 1) * self.interval + EARLY_MS if self.interval else 0

    def pack(self) -> bytes:
        rate = f"{round(86_400_000 / self.interval)}/d" if self.interval else "off"
        most = self.most if self.most == math.inf else int(self.most)
        return Limit(concurrency=most, rate=rate, burst=self.burst, ordered=self.is_ordered).pack()


@dataclass(eq=False)
class Waiting:
    """A job that waits."""

    entry: bytes
    job: str
    key: str
    task: str
    #: None if the job counts under its task's name.
    own_key: str | None


@dataclass
class Model:
    """What the gate should know."""

    queue: Bound = field(default_factory=Bound)
    per_key: Bound = field(default_factory=Bound)
    own: dict[str, Bound] = field(default_factory=dict)
    tasks: dict[str, Bound] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    running: dict[bytes, Waiting] = field(default_factory=dict)
    delayed: dict[str, Waiting] = field(default_factory=dict)
    #: The entry of an ordered job that returned, and the job for which an ordered key waits, by key.
    front: dict[str, bytes] = field(default_factory=dict)
    hold: dict[str, str] = field(default_factory=dict)
    tat: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rest: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class World:
    """A limited queue on a server beside its model."""

    def __init__(self, server: Server, seed: int) -> None:
        self.redis: Any = server.client()
        self.random = random.Random(seed)
        self.model = Model()
        self.now = 1_700_000_000_000.0
        self.jobs = self.delivered = 0
        #: Returned jobs that are not indexed yet; keys whose settled job was not reported.
        self.returning: dict[bytes, Waiting] = {}
        self.unreported: list[str] = []
        #: False if something happened that only `mend` finds out.
        self.is_exact = True
        self.redis.xgroup_create(KEYS.stream, GROUP, "0", mkstream=True)
        self.redis.xgroup_create(KEYS.bell, GROUP, "0", mkstream=True)
        self.model.queue = Bound(self.random.choice([math.inf, 3, 8]))
        self.tick(0)
        self.set_limits()

    def run_script(self, name: str, keys: tuple[str, ...], *arguments: Any) -> Any:
        text = load_script(name).text.replace("call('TIME')", f"call('HMGET', '{CLOCK}', 's', 'us')")
        return self.redis.eval(text, len(keys), *keys, *arguments)

    # --- the model

    def bound_of(self, state: str) -> Bound:
        model = self.model
        return model.tasks.get(state[1:], Bound()) if state[0] == ";" else model.own.get(state[1:], model.per_key)

    def room(self, state: str) -> float:
        """Return how many jobs of a key (`:`), a task (`;`) or the queue (``) may start by their limit."""
        running = self.model.running.values()
        if not state:
            bound, count = self.model.queue, len(running)
        else:
            bound = self.bound_of(state)
            count = sum(state[1:] == (job.key if state[0] == ":" else job.task) for job in running)
        room = bound.most - count
        if bound.interval:
            earliest = max(self.model.tat[state], self.now)
            room = min(room, math.floor((self.now + bound.tau - earliest) / bound.interval) + 1)
        return room

    def next_of(self, key: str) -> Waiting | None:
        line = [job for job in self.model.waiting if job.key == key]
        return next((job for job in line if job.entry == self.model.front.get(key)), line[0] if line else None)

    def is_held(self, key: str) -> bool:
        return self.bound_of(f":{key}").is_ordered and key in self.model.hold

    def may_start(self, key: str) -> bool:
        job = self.next_of(key)
        rests = self.model.rest[key] > self.now or self.is_held(key)
        return job is not None and not rests and self.room(f":{key}") > 0 and self.room(f";{job.task}") > 0

    def may_any_start(self) -> bool:
        return self.room("") > 0 and any(self.may_start(key) for key in {job.key for job in self.model.waiting})

    # --- operations

    def tick(self, ms: float) -> None:
        self.now += ms
        seconds, microseconds = divmod(round(self.now * 1000), 1_000_000)
        self.redis.hset(CLOCK, mapping={"s": seconds, "us": microseconds})

    def add(self) -> None:
        self.jobs += 1
        task, own_key = self.random.choice(TASKS), self.random.choice(JOB_KEYS)
        self.append(Waiting(b"", f"j{self.jobs:05}", own_key or task, task, own_key))

    def append(self, job: Waiting) -> None:
        envelope = msgpack.packb([job.job, b"x", 0, 0]) + encode_extras(JobExtras(key=job.own_key))
        job.entry = self.redis.xadd(KEYS.stream, {"d": envelope, "n": job.task})
        if self.bound_of(f":{job.key}").is_ordered and self.model.hold.get(job.key) == job.job:
            self.returning[job.entry] = job
        self.model.waiting.append(job)

    def take(self, want: int, *news: Any) -> None:
        could_start = self.may_any_start()
        arguments = (GROUP, "w1", want, 10_000, "", *news)
        entries, more, wait, behind, _ = self.run_script("take", KEYS.gate, *arguments)
        while behind:
            _, more, wait, behind, _ = self.run_script("take", KEYS.gate, GROUP, "w1", 0, 10_000, "")
        for entry, job in self.returning.items():  # indexed: the key no longer waits for its job
            if self.model.hold.get(job.key) == job.job:
                del self.model.hold[job.key]
                self.model.front[job.key] = entry
        self.returning.clear()
        for entry, _ in entries:
            self.start(entry)
        if self.is_exact and len(entries) < want and self.may_any_start():
            # Only a parked key may wait a little longer.
            assert self.model.tasks, (want, entries, self.state())
            if could_start:
                self.tick(AGAIN_MS)
                assert self.run_script("take", KEYS.gate, GROUP, "w1", 0, 10_000, "")[1] == 1, self.state()
        if self.is_exact and not self.model.tasks:
            assert more or not self.may_any_start(), self.state()
            self.check_timer(want, wait)
        assert not more or self.redis.hget(KEYS.gate[1], "rung") == b"1"

    def check_timer(self, want: int, wait: bytes) -> None:
        """Check that every key that only waits for time has a timer."""
        if want or self.may_any_start() or self.room("") <= 0:
            return
        for key in {job.key for job in self.model.waiting}:
            bound = self.bound_of(f":{key}")
            running = sum(job.key == key for job in self.model.running.values())
            if running < bound.most and not self.is_held(key):
                opens_ms = max(self.model.tat[f":{key}"] - bound.tau, self.model.rest[key]) - self.now
                assert wait, (key, opens_ms, self.state())
                assert int(wait) <= math.ceil(opens_ms) + 1, (key, opens_ms, self.state())

    def start(self, entry: bytes) -> None:
        model = self.model
        (job,) = [job for job in model.waiting if job.entry == entry]
        assert self.next_of(job.key) is job, ("order", self.state())
        assert self.room("") > 0, ("queue", self.state())
        assert self.room(f":{job.key}") > 0, ("key", job, self.state())
        assert self.room(f";{job.task}") > 0, ("task", job, self.state())
        assert not self.is_held(job.key), ("held", job, self.state())
        assert model.rest[job.key] <= self.now, ("rests", job, self.state())
        model.waiting.remove(job)
        if model.front.get(job.key) == entry:
            del model.front[job.key]
        model.running[entry] = job
        for state in ("", f":{job.key}", f";{job.task}"):
            interval = self.bound_of(state).interval if state else model.queue.interval
            if interval:
                model.tat[state] = max(model.tat[state], self.now) + interval
        if self.bound_of(f":{job.key}").is_ordered:
            model.hold[job.key] = job.job
        self.delivered += 1

    def settle(self, outcome: str, *, is_reported: bool = True) -> None:
        if not self.model.running:
            return
        entry = self.random.choice(list(self.model.running))
        job = self.model.running.pop(entry)
        if outcome == "retry":
            self.model.delayed[job.job] = job
            self.redis.hset(KEYS.due, job.job[-10:], b"123456")
        self.redis.xack(KEYS.stream, GROUP, entry)
        self.redis.xdel(KEYS.stream, entry)
        if outcome == "hand back":
            self.append(job)
        is_final = outcome == "done"
        if is_reported:
            if is_final and self.model.hold.get(job.key) == job.job:
                del self.model.hold[job.key]
            news = ("f" if is_final else "r", entry)
            self.take(self.random.choice([0, 1, 1, 5]), *news)
            if self.random.random() < 0.1:
                self.take(0, *news)  # resent
        else:  # the worker died before it could report it, or is of another version
            self.is_exact = False
            if is_final and self.model.hold.get(job.key) == job.job:
                self.unreported.append(job.key)

    def rest(self) -> None:
        key, ms = self.random.choice(JOB_KEYS[:-1]), self.random.choice([5, 50, 400])
        assert key
        self.model.rest[key] = max(self.model.rest[key], self.now + ms)
        self.take(self.random.choice([0, 2]), "h", f"{ms} :{key}")

    def promote(self) -> None:
        if self.model.delayed:
            job = self.model.delayed.pop(self.random.choice(list(self.model.delayed)))
            self.redis.hdel(KEYS.due, job.job[-10:])
            self.append(job)

    def cancel_delayed(self) -> None:
        if self.model.delayed:
            job = self.model.delayed.pop(self.random.choice(list(self.model.delayed)))
            self.redis.hdel(KEYS.due, job.job[-10:])
            if self.model.hold.get(job.key) == job.job:
                self.unreported.append(job.key)
                self.is_exact = False

    def purge_one(self) -> None:
        if self.model.waiting:
            job = self.random.choice(self.model.waiting)
            self.model.waiting.remove(job)
            self.redis.xdel(KEYS.stream, job.entry)
            if self.model.front.get(job.key) == job.entry:
                del self.model.front[job.key]
            if self.returning.pop(job.entry, None):
                self.unreported.append(job.key)
            self.is_exact = False

    def lose_the_gate(self) -> None:
        bounds = [self.model.queue, self.model.per_key, *self.model.own.values(), *self.model.tasks.values()]
        if not any(bound.is_ordered or bound.interval for bound in bounds):  # what is lost with it for good
            self.take(0)
            self.redis.delete(*KEYS.gate[1:7])
            self.model.front.clear()
            self.model.rest.clear()
            self.is_exact = False
            self.mend()

    def mend(self) -> None:
        self.take(0)
        for _ in range(2):
            cursors, unfinished = FIRST_PAGE, set(range(5))
            while unfinished:
                page = self.random.choice([3, 100])
                reply = self.run_script("mend", (*KEYS.gate, KEYS.due), GROUP, page, KEYS.delayed_index(""), *cursors)
                cursors = tuple(reply[:5])
                unfinished -= {number for number in range(5) if not cursors[number]}
        model = self.model
        running = {job.job for job in model.running.values()}
        for key in self.unreported:
            if model.hold.get(key) not in {None, *model.delayed, *running}:
                del model.hold[key]
        self.unreported.clear()
        self.is_exact = True
        self.take(0)
        slots = {entry: f"{job.key}\0{job.task}".encode() for entry, job in model.running.items()}
        assert self.redis.hgetall(KEYS.gate[6]) == slots
        line = {entry_of(member) for member in self.redis.zrange(KEYS.gate[2], 0, -1)}
        waiting = {job.entry for job in model.waiting}
        assert waiting <= line, self.state()
        # Of entries that were deleted, only those first in their lines are found.
        assert not any(self.redis.xrange(KEYS.stream, entry, entry) for entry in line - waiting), self.state()
        assert self.redis.xlen(KEYS.stream) == len(model.running) + len(model.waiting)

    def relimit(self) -> None:
        choice, model = self.random.choice, self.model
        is_idle = not (model.delayed or model.hold or model.front or self.returning or model.running)
        if self.random.random() < 0.5:
            model.queue = Bound(choice([math.inf, 0, 1, 3, 8]), choice([0, 0, 20, 100]), choice([1, 5]))
        elif is_idle or not model.per_key.is_ordered:
            is_ordered = is_idle and self.random.random() < 0.5
            model.per_key = Bound(choice([math.inf, 1, 2, 4]), choice([0, 0, 30, 200]), choice([1, 3]), is_ordered)
        model.own = {}
        if self.random.random() < 0.5 and not model.per_key.is_ordered:
            model.own = {choice("ABtu"): Bound(choice([0, 1, 5]), choice([0, 50]))}
        model.tasks = {}
        if self.random.random() < 0.5:
            model.tasks = {choice(TASKS): Bound(choice([math.inf, 0, 1, 3]), choice([0, 50, 200]), choice([1, 2]))}
        self.set_limits()

    def set_limits(self) -> None:
        model = self.model
        for state in ["", *(f":{key}" for key in "ABCDtu"), *(f";{task}" for task in TASKS)]:
            bound = self.bound_of(state) if state else model.queue
            longest = self.now + bound.tau + bound.interval
            model.tat[state] = min(model.tat[state], longest) if bound.interval else 0.0
        fields = {"": model.queue.pack(), "*": model.per_key.pack()}
        fields |= {f":{key}": bound.pack() for key, bound in model.own.items()}
        fields |= {f";{task}": bound.pack() for task, bound in model.tasks.items()}
        old = {field.decode() for field in self.redis.hkeys(KEYS.limits)}
        pairs = fields | dict.fromkeys(old - fields.keys() - {"#"}, b"")
        assert self.run_script("limit", (KEYS.limits,), *(part for pair in pairs.items() for part in pair)) == 1
        self.is_exact = False
        self.mend()

    def state(self) -> dict[str, Any]:
        """Return everything, for the message of a failure."""
        _, gate, line, turn, cool, parked, slots, *_ = KEYS.gate
        read = self.redis
        zsets = {name: read.zrange(name, 0, -1, withscores=True) for name in (line, turn, cool, parked)}
        return {"now": self.now, "model": self.model, "gate": read.hgetall(gate), "slots": read.hgetall(slots), **zsets}

    def operations(self) -> dict[Callable[[], object], float]:
        """Return the operations with their weights."""
        choice = self.random.choice
        return {
            self.add: 10,
            lambda: self.take(choice([1, 1, 2, 7])): 8,
            lambda: self.settle("done"): 7,
            lambda: self.settle("retry"): 3,
            lambda: self.settle("hand back"): 1,
            lambda: self.settle("done", is_reported=False): 0.7,
            lambda: self.settle("retry", is_reported=False): 0.4,
            self.promote: 3,
            self.cancel_delayed: 0.3,
            self.mend: 0.7,
            self.purge_one: 0.4,
            lambda: self.tick(choice([1, 10, 60, 300])): 4,
            self.relimit: 0.5,
            self.lose_the_gate: 0.15,
            self.rest: 0.4,
        }


def entry_of(member: bytes) -> bytes:
    """Return the entry of a member of the line: key, NUL, rank, length, ms, length, number, task."""
    text = member.split(b"\0", 1)[1][1:]
    dash = text[0]
    return text[1:dash] + b"-" + text[dash + 1 : dash + 1 + text[dash]]


@pytest.mark.servers
@pytest.mark.parametrize("seed", range(12))
def test_the_gate_does_what_the_model_says(server: Server, seed: int) -> None:
    world = World(server, seed)
    operations, weights = zip(*world.operations().items(), strict=True)
    for _ in range(STEPS):
        world.random.choices(operations, weights)[0]()
    world.mend()
