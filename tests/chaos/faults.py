"""Every kind of fault that can be injected, into one process or into the server.

`checker.EXCUSES` decides which of them excuse a second start.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

import redis

from chaos.records import in_flight
from servers.process import eventually

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Awaitable, Callable

    from chaos.failovers import FailoverWatch
    from chaos.fleet import Fleet, Member
    from chaos.records import Recorder
    from chaos.servers import ClockedServer
    from chaos.wire import Wire
    from servers.cluster import Cluster
    from servers.sentinel import SentinelSetup

EVERYBODY = "*"
#: How long to look for a process with a job in flight, in seconds.
AIM_SECS = 20.0


class Lab:
    """The processes, servers and proxies that faults act on."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        records: Recorder,
        rng: random.Random,
        lease_secs: float,
        server: ClockedServer | None = None,
        sentinel: SentinelSetup | None = None,
        failover_watch: FailoverWatch | None = None,
        cluster: Cluster | None = None,
        wires: dict[int, Wire] | None = None,
        queue_key: str = "",
    ) -> None:
        self.fleet = fleet
        self.records = records
        self.rng = rng
        self.lease_secs = lease_secs
        self._server, self._sentinel, self._cluster = server, sentinel, cluster
        self._failover_watch = failover_watch
        #: Proxies, by the place of the process that connects through them.
        self.wires = wires or {}
        #: A key of the queue, which determines its slot.
        self.queue_key = queue_key

    @property
    def has_server(self) -> bool:
        """True for a single server, which faults may kill."""
        return self._server is not None

    @property
    def server(self) -> ClockedServer:
        assert self._server is not None
        return self._server

    @property
    def sentinel(self) -> SentinelSetup:
        assert self._sentinel is not None
        return self._sentinel

    @property
    def failover_watch(self) -> FailoverWatch:
        assert self._failover_watch is not None
        return self._failover_watch

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    @contextlib.asynccontextmanager
    async def recorded(self, kind: str, target: str = EVERYBODY) -> AsyncIterator[None]:
        """Record the fault that is injected inside the block. One without a target waits for a job in flight first."""
        if target == EVERYBODY:
            await self.aim(self.fleet.workers)
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.records.write("fault", kind, target, begin, time.monotonic_ns())

    @contextlib.asynccontextmanager
    async def victim(self, members: list[Member]) -> AsyncIterator[Member | None]:
        """Aim at a process, and exclude it from other faults until the block ends."""
        member = await self.aim(members)
        if member is None:
            yield None
            return
        member.is_in_trouble = True
        try:
            yield member
        finally:
            member.is_in_trouble = False

    async def aim(self, members: list[Member]) -> Member | None:
        """Return a process that has a job in flight and no other fault; None if there is none within `AIM_SECS`."""
        give_up_at = time.monotonic() + AIM_SECS
        while time.monotonic() < give_up_at:
            able = [member for member in members if member.is_at_work and not member.is_in_trouble]
            self.rng.shuffle(able)
            for member in able:
                if in_flight(self.fleet.folder / "records", member.name):
                    return member
            await asyncio.sleep(0.002)
        return None

    async def command(self, *words: Any) -> Any:
        """Send one command to the server, over a new connection."""
        return await asyncio.to_thread(self._command, words)

    def _command(self, words: tuple[Any, ...]) -> Any:
        def ask() -> list[Any]:
            with self.server._connect(socket_timeout=60.0) as client:
                try:
                    return [client.execute_command(*words)]
                except redis.ResponseError as error:
                    if str(error).startswith("BUSY "):
                        return []
                    raise

        # Another fault may affect the server or this connection at the same time.
        # After a kill, a server on a busy machine may need a minute to load what it has written.
        return eventually(ask, f"the server answers {words[0]}", within_secs=120)[0]

    def some(self, low: float, high: float) -> float:
        """Return a random number of leases, in seconds."""
        return self.rng.uniform(low, high) * self.lease_secs


# --- processes


async def kill(lab: Lab) -> None:
    async with lab.victim(lab.fleet.workers) as worker:
        if worker is not None:
            async with lab.recorded("kill", worker.name):
                worker.signal(signal.SIGKILL)
                await worker.end()


async def stop(lab: Lab) -> None:
    """Suspend a worker for longer than its lease."""
    async with lab.victim(lab.fleet.workers) as worker:
        if worker is not None:
            async with lab.recorded("stop", worker.name):
                worker.signal(signal.SIGSTOP)
                await asyncio.sleep(lab.some(1.3, 2.2))
                worker.signal(signal.SIGCONT)


async def term(lab: Lab) -> None:
    """Deploy: the worker finishes its running jobs, and a new one replaces it."""
    async with lab.victim(lab.fleet.workers) as worker:
        if worker is None:
            return
        async with lab.recorded("term", worker.name):
            worker.is_expected_to_end = True
            worker.signal(signal.SIGTERM)
            await worker.end()
            lab.fleet.retire(worker)
        _note_end(lab, worker)


async def roll(lab: Lab) -> None:
    """Deploy: a new worker of the same name starts while the old one finishes its running jobs."""
    async with lab.victim(lab.fleet.workers) as worker:
        if worker is None:
            return
        async with lab.recorded("roll", worker.name):
            worker.is_expected_to_end = True
            worker.signal(signal.SIGTERM)
            lab.fleet.retire(worker)
            await worker.end()
        _note_end(lab, worker)


def _note_end(lab: Lab, worker: Member) -> None:
    worker.hang_up()
    if worker.process.returncode != 0:
        lab.records.write("death", worker.name)  # a handler has ended it in the meantime


async def fds(lab: Lab) -> None:
    """Use up all file descriptors of a worker, and close its connections."""
    async with lab.victim(lab.fleet.workers) as worker:
        if worker is None:
            return
        seconds = lab.some(0.5, 1.5)
        async with lab.recorded("fds", worker.name):
            worker.say(f"fds {seconds:.3f}")
            await asyncio.sleep(0.2)
            await lab.command("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(seconds)


async def producer_kill(lab: Lab) -> None:
    async with lab.victim(lab.fleet.producers) as producer:
        if producer is not None:
            async with lab.recorded("producer-kill", producer.name):
                producer.signal(signal.SIGKILL)
                await producer.end()


# --- the server


async def server_kill(lab: Lab) -> None:
    async with lab.recorded("server-kill"):
        lab.server.kill()
        await asyncio.sleep(lab.some(0, 1.8))
        await asyncio.to_thread(lab.server.start)


async def server_stop(lab: Lab) -> None:
    async with lab.recorded("server-stop"):
        lab.server.pause()
        await asyncio.sleep(lab.some(0.5, 2))
        lab.server.resume()


async def client_kill(lab: Lab) -> None:
    async with lab.recorded("client-kill"):
        await lab.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def client_pause(lab: Lab) -> None:
    seconds = lab.some(0.5, 1.8)
    async with lab.recorded("client-pause"):
        await lab.command("CLIENT", "PAUSE", int(seconds * 1000), lab.rng.choice(("ALL", "WRITE")))
        await asyncio.sleep(seconds)


async def busy(lab: Lab) -> None:
    """Run a script that does not end until it is killed."""
    async with lab.recorded("busy"):
        running = asyncio.create_task(lab.command("EVAL", "while true do end", 0))
        await asyncio.sleep(lab.some(0.3, 1.8))
        while not running.done():
            with contextlib.suppress(redis.ResponseError):  # NOTBUSY: it has not started yet
                await lab.command("SCRIPT", "KILL")
            await asyncio.wait({running}, timeout=0.2)
        with contextlib.suppress(redis.RedisError):
            running.result()


async def oom(lab: Lab) -> None:
    async with lab.recorded("oom"):
        await lab.command("CONFIG", "SET", "maxmemory", "1mb")
        await asyncio.sleep(lab.some(0.2, 1))
        await lab.command("CONFIG", "SET", "maxmemory", "0")


async def evict(lab: Lab) -> None:
    """Delete keys that a server may evict: what it knows about chains, leases, leaders and workers."""
    async with lab.recorded("evict"):
        for pattern in ("pseq:*", "leases:*", "takeovers:*", "wake", "worker:*", "promoter:lock", "scheduler:lock"):
            found = await lab.command("KEYS", "{chasqui:q}:" + pattern)
            if found:
                await lab.command("DEL", *found)


async def script_flush(lab: Lab) -> None:
    async with lab.recorded("script-flush"):
        await lab.command("SCRIPT", "FLUSH")


async def clock_forward(lab: Lab) -> None:
    async with lab.recorded("clock-forward"):
        lab.server.step_clock(int(lab.some(1.2, 3) * 1000))
        await asyncio.sleep(0.1)


async def clock_jump(lab: Lab) -> None:
    """Set the clock forward by more than an hour: most keys with a TTL are gone, and many schedules are due."""
    async with lab.recorded("clock-jump"):
        lab.server.step_clock(3_660_000)
        await asyncio.sleep(0.1)


async def clock_back(lab: Lab) -> None:
    async with lab.recorded("clock-back"):
        lab.server.step_clock(-int(lab.some(0.2, 1) * 1000))
        await asyncio.sleep(0.1)


# --- the network, between one process and the server


def _on_a_wire(kind: str, act: Callable[[Lab, Wire], Awaitable[None]]) -> Callable[[Lab], Awaitable[None]]:
    async def inject(lab: Lab) -> None:
        async with lab.victim([member for member in lab.fleet.members if member.place in lab.wires]) as member:
            if member is not None:
                wire = lab.wires[member.place]
                async with lab.recorded(kind, member.name):
                    await act(lab, wire)
                    wire.heal()

    return inject


async def _cut(lab: Lab, wire: Wire) -> None:
    wire.cut(after_bytes=lab.rng.choice((0, 1, 100, 5000)))
    await asyncio.sleep(0.1)


async def _delay(lab: Lab, wire: Wire) -> None:
    wire.delay_secs = lab.rng.uniform(0.005, 0.1)
    await asyncio.sleep(lab.some(0.3, 1))


async def _throttle(lab: Lab, wire: Wire) -> None:
    wire.bytes_per_sec = 100_000
    await asyncio.sleep(lab.some(0.3, 1))


async def _half_close(lab: Lab, wire: Wire) -> None:
    wire.half_close()
    await asyncio.sleep(0.3)
    wire.cut()


async def _blackhole(lab: Lab, wire: Wire) -> None:
    """Swallow data for less time than a lease lasts beyond its renewal."""
    wire.swallow()
    await asyncio.sleep(lab.some(0.05, 0.25))


async def _partition(lab: Lab, wire: Wire) -> None:
    """Swallow data for longer than the lease: it arrives after other workers have taken over the jobs."""
    wire.swallow()
    await asyncio.sleep(lab.some(1.3, 2.2))


# --- failover and slots


async def failover(lab: Lab) -> None:
    """Make the replica the master. The watch records the fault, with the time from which on writes are lost."""
    sentinel, watch = lab.sentinel, lab.failover_watch
    await lab.aim(lab.fleet.workers)
    before = watch.failovers
    with sentinel.sentinels[0]._connect() as client:
        for _ in range(200):
            with contextlib.suppress(redis.RedisError):
                await asyncio.to_thread(client.execute_command, "SENTINEL FAILOVER", sentinel.name)
                break
            await asyncio.sleep(0.1)
    for _ in range(600):
        if watch.failovers > before:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(lab.lease_secs)


async def slot_move(lab: Lab) -> None:
    """Move the queue's slot to another node, key by key, while it is used."""
    async with lab.recorded("slot-move"):
        await asyncio.to_thread(_move_slot, lab)


def _move_slot(lab: Lab) -> None:
    cluster = lab.cluster
    source = cluster.node_of(lab.queue_key)
    cluster.move_slot(lab.queue_key, lab.rng.choice([node for node in cluster.masters if node is not source]))


FAULTS: dict[str, Callable[[Lab], Awaitable[None]]] = {
    "kill": kill,
    "stop": stop,
    "term": term,
    "roll": roll,
    "fds": fds,
    "producer-kill": producer_kill,
    "server-kill": server_kill,
    "server-stop": server_stop,
    "client-kill": client_kill,
    "client-pause": client_pause,
    "busy": busy,
    "oom": oom,
    "evict": evict,
    "script-flush": script_flush,
    "clock-forward": clock_forward,
    "clock-back": clock_back,
    "clock-jump": clock_jump,
    "cut": _on_a_wire("cut", _cut),
    "delay": _on_a_wire("delay", _delay),
    "throttle": _on_a_wire("throttle", _throttle),
    "half-close": _on_a_wire("half-close", _half_close),
    "blackhole": _on_a_wire("blackhole", _blackhole),
    "partition": _on_a_wire("partition", _partition),
    "failover": failover,
    "slot-move": slot_move,
}

CLOCK_STEPS = ("clock-forward", "clock-back")
#: Lanes of each topology: a factor for its pauses, and its faults, which happen one at a time.
LANES: dict[str, list[tuple[float, tuple[str, ...]]]] = {
    "single": [
        (1, ("kill", "stop", "term", "roll", "fds", "producer-kill")),
        # Longer pauses: while the server is unreachable, other faults hit nothing.
        (3, ("server-kill", "server-stop", "client-kill", "client-pause", "busy", "oom", "script-flush", *CLOCK_STEPS)),
        (3, ("evict",)),
        (20, ("clock-jump",)),
        (1, ("cut", "delay", "throttle", "half-close", "blackhole", "partition")),
    ],
    "sentinel": [(2, ("failover",)), (1, ("kill", "stop", "term", "producer-kill"))],
    "cluster": [(2, ("slot-move",)), (1, ("kill", "stop", "term", "producer-kill"))],
}
