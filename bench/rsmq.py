"""RSMQ against the others: the JavaScript `rsmq` from npm and PyRSMQ from PyPI, on one server, in one run.

    .venv/bin/python bench/rsmq.py [--rounds 5] [--messages 1500] [--server redis86]

All take turns, in ten short slices a round, so that a busy moment hits everybody; a figure is the median of the rounds.
One line for each bar: `bar NAME ratio R needs N ok|short`. Ends with 1 when one is short. One client, 100-byte bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

import uvloop

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "rsmq")]
from rsmq_peer import JsRsmq  # noqa: E402 - found there only now

from servers.binaries import cache_dir, server_binary  # noqa: E402
from servers.process import Server  # noqa: E402
from tampu.rsmq import Rsmq  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BODY = "x" * 100
CALLERS = 100
BATCH = 100
#: Turns that everybody takes in one round.
SLICES = 10
PYRSMQ = "PyRSMQ==0.6.1"

#: Name, figure, figure it is compared with, what the ratio has to be.
BARS = [
    ("send-js", "ours send", "js send", 1.5),
    ("receive-delete-js", "ours receive+delete", "js receive+delete", 1.3),
    ("send-pyrsmq", "ours send", "pyrsmq send", 2.5),
    ("receive-delete-pyrsmq", "ours receive+delete", "pyrsmq receive+delete", 2.5),
    ("send-100-callers", "100 callers send", "ours send", 8.0),
    ("receive-delete-100-callers", "100 callers receive+delete", "ours receive+delete", 8.0),
    ("send-batches", "batches send", "ours send", 8.0),
    ("receive-delete-batches", "batches receive+delete", "ours receive+delete", 8.0),
]

#: Runs in PyRSMQ's own environment: a JSON line [what, times] in, seconds out.
PYRSMQ_DRIVER = """
import json, sys, time
from rsmq import RedisSMQ
queue = RedisSMQ(host="127.0.0.1", port=sys.argv[1], qname="bench")
for line in sys.stdin:
    what, times, body = json.loads(line)
    began = time.perf_counter()
    for _ in range(times):
        if what == "send":
            queue.sendMessage(message=body).execute()
        else:
            queue.deleteMessage(id=queue.receiveMessage().execute()["id"]).execute()
    print(time.perf_counter() - began, flush=True)
"""


def pyrsmq_python() -> Path:
    """The Python of an environment with PyRSMQ in it, in the cache; made at the first call."""
    name = f"pyrsmq-0.6.1-py{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache_dir() / "peers" / name
    python, done = folder / "bin" / "python", folder / ".installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", PYRSMQ], check=True)
            done.touch()
    return python


class PyRsmq:
    """PyRSMQ in a process of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        command = [str(pyrsmq_python()), "-c", PYRSMQ_DRIVER, str(self._port)]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    async def timed(self, what: str, times: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, times, BODY]).encode() + b"\n")
        return float(await self._process.stdout.readline())

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


class Ours:
    """What we do, one by one, by many callers, and in batches."""

    def __init__(self, rsmq: Rsmq) -> None:
        self._rsmq = rsmq

    async def send(self, times: int) -> None:
        for _ in range(times):
            await self._rsmq.send_message("bench", BODY)

    async def receive(self, times: int) -> None:
        for _ in range(times):
            message = await self._rsmq.receive_message("bench")
            assert message is not None
            await self._rsmq.delete_message("bench", message.id)

    async def by_callers(self, work: Callable[[int], Awaitable[None]], times: int) -> None:
        await asyncio.gather(*(work(times // CALLERS) for _ in range(CALLERS)))

    async def send_batches(self, times: int) -> None:
        for _ in range(times // BATCH):
            await self._rsmq.send_messages("bench", [BODY] * BATCH)

    async def receive_batches(self, times: int) -> None:
        for _ in range(times // BATCH):
            messages = await self._rsmq.receive_messages("bench", max=BATCH)
            assert len(messages) == BATCH
            await self._rsmq.delete_messages("bench", [message.id for message in messages])


async def measure(server: Server, rounds: int, messages: int) -> dict[str, float]:
    """Messages per second: the median of the rounds."""
    rates: dict[str, list[float]] = defaultdict(list)
    share = max(messages // SLICES, 1)
    many = max(share * 20 // CALLERS, 1) * CALLERS
    send = ("sendMessage", {"qname": "bench", "message": BODY})
    receive = (("receiveMessage", {"qname": "bench"}), ("deleteMessage", {"qname": "bench", "id": "LAST"}))
    async with Rsmq(server.url) as rsmq, JsRsmq(server.port) as js, PyRsmq(server.port) as pyrsmq:
        ours = Ours(rsmq)
        # The receiving half takes out what the sending half put in: the queue is as long for everybody.
        runs: list[tuple[str, int, Callable[[], Awaitable[float]]]] = [
            ("js send", share, lambda: js.timed(share, send)),
            ("ours send", share, lambda: timed(ours.send(share))),
            ("pyrsmq send", share, lambda: pyrsmq.timed("send", share)),
            ("100 callers send", many, lambda: timed(ours.by_callers(ours.send, many))),
            ("batches send", many, lambda: timed(ours.send_batches(many))),
            ("js receive+delete", share, lambda: js.timed(share, *receive)),
            ("ours receive+delete", share, lambda: timed(ours.receive(share))),
            ("pyrsmq receive+delete", share, lambda: pyrsmq.timed("receive", share)),
            ("100 callers receive+delete", many, lambda: timed(ours.by_callers(ours.receive, many))),
            ("batches receive+delete", many, lambda: timed(ours.receive_batches(many))),
        ]
        await rsmq.create_queue("bench")
        for number in range(rounds + 1):
            seconds: dict[str, float] = defaultdict(float)
            for _ in range(SLICES):
                for name, _, run in runs:
                    seconds[name] += await run()
            if number:  # the first round warms everybody up
                for name, count, _ in runs:
                    rates[name].append(count * SLICES / seconds[name])
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1500, help="per round and contestant")
    parser.add_argument("--server", default="redis86", help="redis86, valkey, redis70 or redis62")
    arguments = parser.parse_args()
    binary = server_binary(arguments.server) or server_binary("valkey")
    if binary is None:
        parser.error(f"no such server here: {arguments.server}; run `make servers`")
    with tempfile.TemporaryDirectory(prefix="tampu-bench-") as folder:
        server = Server(arguments.server, binary, Path(folder))
        server.start()
        try:
            rates = uvloop.run(measure(server, arguments.rounds, arguments.messages))
        finally:
            server.stop()
    for name, rate in sorted(rates.items()):
        print(f"{name:<28} {rate:>9,.0f}/s")
    short = 0
    for name, figure, reference, needed in BARS:
        ratio = rates[figure] / rates[reference]
        short += ratio < needed
        print(f"bar {name} ratio {ratio:.2f} needs {needed:g} {'ok' if ratio >= needed else 'short'}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
