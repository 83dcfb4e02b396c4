"""A job must not cost more than `budget.json` allows. This guard counts instead of measuring time.

Each figure is the best of several attempts: how many jobs share a window varies, but a command, a call or a line
executed for every job shows up in every attempt. After an intended change, record the budget again with
`TAMPU_RECORD_BUDGET=1 pytest tests/bench` and say why in the commit message.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from meter import Meter

from support.tracing import traced_by
from tampu import (
    AddOptions,
    BackoffSpec,
    Consumer,
    ConsumerConfig,
    JobRetryOverride,
    Producer,
    ProducerConfig,
    Queue,
    SignedCodec,
    Worker,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

    from servers.process import Server

BUDGET = Path(__file__).with_name("budget.json")
ATTEMPTS = 30
QUEUE = "budget"
PAYLOAD = {"to": "ada@example.com", "subject": "Welcome aboard", "body": "x" * 60}
#: Allowed excess: less than one request or call per job, and about one line's worth of instructions.
SLACK = {"requests": 0.3, "bytes": 12, "calls": 0.7, "instructions": 12}
SHARE = 0.05
#: Bytes of a request without its jobs: the script, its keys and fixed arguments.
REQUEST_BYTES = 350
#: Threads may still run a job when its start is sent; then its ID and name are sent twice. How many do depends on how
#: busy the machine is.
RUNS_IN_THREADS = ("defaults, a plain function",)
START_BYTES = 60
#: Calls and instructions differ between Python versions; commands and requests do not.
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


async def one_by_one(url: str, meter: Meter) -> int:
    async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
        await producer.add(PAYLOAD)
        with meter:
            for _ in range(200):
                await producer.add(PAYLOAD)
    return 200


async def in_a_gather(url: str, meter: Meter) -> int:
    async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
        await producer.add(PAYLOAD)
        with meter:
            await asyncio.gather(*(producer.add(PAYLOAD) for _ in range(1000)))
    return 1000


async def in_a_bulk(url: str, meter: Meter) -> int:
    async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
        await producer.add(PAYLOAD)
        with meter:
            await producer.add_bulk([PAYLOAD] * 1024)
    return 1024


async def in_bulks_of_50(url: str, meter: Meter) -> int:
    async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
        await producer.add(PAYLOAD)
        with meter:
            for _ in range(20):
                await producer.add_bulk([PAYLOAD] * 50)
    return 1000


async def delayed_in_a_bulk(url: str, meter: Meter) -> int:
    async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
        await producer.add(PAYLOAD)
        with meter:
            await producer.add_in_bulk(3600, [PAYLOAD] * 1024)
    return 1024


def worked_off(*, fails_once: bool = False, **settings: Any) -> Callable[[str, Meter], Awaitable[int]]:
    async def scenario(url: str, meter: Meter) -> int:
        jobs, done = 1024, 0
        retry = JobRetryOverride(3, BackoffSpec.fixed(1, jitter_ms=0))
        options = AddOptions(retry=retry) if fails_once else AddOptions()
        async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
            await producer.add_bulk_with_options([PAYLOAD] * jobs, options)
        shutdown = asyncio.Event()

        async def handler(job: Any) -> Any:
            nonlocal done
            if fails_once and job.attempt == 0:
                raise ValueError("first run")
            done += 1
            if done == jobs:
                shutdown.set()
            return b"\x81\xa4sent\xc3"

        config = ConsumerConfig(queue_name=QUEUE, block_ms=100, batch=256, **settings)
        with meter:
            await Consumer(url, config).run(handler, shutdown)
        return jobs

    return scenario


async def large_in_a_bulk(url: str, meter: Meter) -> int:
    async with Producer.connect(url, ProducerConfig(queue_name=QUEUE)) as producer:
        payloads = ["x" * 10_000] * 100
        await producer.add_bulk(payloads)
        with meter:
            await producer.add_bulk(payloads)
    return 100


def with_defaults(*, plain: bool = False, codec: SignedCodec | None = None) -> Callable[[str, Meter], Awaitable[int]]:
    async def scenario(url: str, meter: Meter) -> int:
        jobs, done = 1024, 0
        finished = asyncio.Event()
        loop = asyncio.get_running_loop()

        def count() -> dict[str, bool]:
            nonlocal done
            done += 1
            if done == jobs:
                loop.call_soon_threadsafe(finished.set)
            return {"sent": True}

        def send(to: str, subject: str, body: str) -> dict[str, bool]:
            return count()

        async def send_on_loop(to: str, subject: str, body: str) -> dict[str, bool]:
            return count()

        async with Queue(QUEUE, url=url, codec=codec) as queue:
            task: Any = queue.task(send) if plain else queue.task(send_on_loop)
            await task.add_bulk([PAYLOAD] * jobs)
            with meter:
                async with Worker(queue):
                    await finished.wait()
        return jobs

    return scenario


async def round_trips(url: str, meter: Meter) -> int:
    async with Queue(QUEUE, url=url) as queue:

        @queue.task
        async def send(to: str, subject: str, body: str) -> dict[str, bool]:
            return {"sent": True}

        async with Worker(queue):
            await (await send.add(**PAYLOAD)).result()
            with meter:
                for _ in range(200):
                    await (await send.add(**PAYLOAD)).result()
    return 200


SCENARIOS: dict[str, Callable[[str, Meter], Awaitable[int]]] = {
    "defaults": with_defaults(),
    "defaults, a plain function": with_defaults(plain=True),
    "defaults, signed": with_defaults(codec=SignedCodec({"a": bytes(32)})),
    "a round trip": round_trips,
    "one add after the other": one_by_one,
    "adds in a gather": in_a_gather,
    "a bulk": in_a_bulk,
    "bulks of 50": in_bulks_of_50,
    "a bulk of large jobs": large_in_a_bulk,
    "a delayed bulk": delayed_in_a_bulk,
    "running": worked_off(events_enabled=False),
    "running, events on": worked_off(events_enabled=True),
    "running, results stored": worked_off(events_enabled=False, store_results=True),
    "failing once": worked_off(events_enabled=False, fails_once=True),
}


def best_of(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the minimum of each figure."""
    names = set.intersection(*(set(each["commands"]) for each in attempts))
    least: dict[str, Any] = {
        figure: min(each[figure] for each in attempts) for figure in ("requests", "bytes", "calls", "instructions")
    }
    return {**least, "commands": {name: min(each["commands"][name] for each in attempts) for name in sorted(names)}}


def over_budget(found: dict[str, Any], allowed: dict[str, Any], name: str = "") -> list[str]:
    """Return a sentence for each figure of a scenario that is over budget."""
    over = [
        f"{found['commands'][command]} {command} per job, {allowed['commands'].get(command, 0)} allowed"
        for command in found["commands"]
        if found["commands"][command] > allowed["commands"].get(command, 0)
    ]
    for figure, slack in SLACK.items():
        limit = allowed[figure] if figure in ("requests", "bytes") else allowed.get(PYTHON, {}).get(figure)
        # On a busy machine, fewer jobs share a window: each window that is sent in addition has a header.
        more = REQUEST_BYTES * max(found["requests"] - allowed["requests"], 0) if figure == "bytes" else 0
        if figure == "bytes" and name in RUNS_IN_THREADS:
            more += START_BYTES
        # With thousands of instructions, some depend on how many jobs share a window.
        if limit is not None and found[figure] > limit + max(slack, limit * SHARE) + more:
            over.append(f"{found[figure]} {figure} per job, {limit} allowed")
    return over


@pytest.mark.untraced
@pytest.mark.servers("valkey", "redis86")
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_job_costs_no_more_than_its_budget(
    name: str, server: Server, server_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[dict[str, Any]] = []
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    allowed = budget.get(name, {}).get(server_kind)
    is_recording = bool(os.environ.get("TAMPU_RECORD_BUDGET"))
    while len(attempts) < ATTEMPTS:
        client = server.client()
        client.flushall()
        meter = Meter(client, monkeypatch)
        jobs = await SCENARIOS[name](server.url, meter)
        attempts.append(meter.per_job(jobs))
        if not is_recording and not over_budget(best_of(attempts), allowed, name):
            return
    found = best_of(attempts)
    if is_recording:
        budget.setdefault(name, {})[server_kind] = {
            **(allowed or {}),
            "commands": found["commands"],
            "requests": found["requests"],
            "bytes": found["bytes"],
            PYTHON: {"calls": found["calls"], "instructions": found["instructions"]},
        }
        BUDGET.write_text(json.dumps(budget, indent=1, sort_keys=True) + "\n")
        return
    pytest.fail(f"{name}: " + "; ".join(over_budget(found, allowed, name)))


@pytest.mark.untraced
@pytest.mark.servers("valkey", "redis86")
async def test_one_more_command_for_every_job_is_over_budget(
    server: Server, server_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(server.client(), monkeypatch)
    async with Producer.connect(server.url, ProducerConfig(queue_name=QUEUE)) as producer:
        await producer.add(PAYLOAD)
        with meter:
            for _ in range(50):
                await producer.add(PAYLOAD)
                await producer.client.call("INCR", "added")
    allowed = json.loads(BUDGET.read_text())["one add after the other"][server_kind]
    said = over_budget(meter.per_job(50), allowed)
    assert said[0] == "1 incr per job, 0 allowed"
    assert any("requests" in line for line in said)


def test_the_meter_leaves_coverage_on_in_later_threads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def coverage(frame: FrameType, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    def work() -> None:
        pass

    with traced_by(coverage):
        with Meter(server.client(), monkeypatch):
            pass
        assert sys.gettrace() is coverage
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "work" in seen


def test_every_figure_over_budget_is_reported() -> None:
    allowed = {"commands": {"xadd": 1}, "requests": 0.02, "bytes": 150, PYTHON: {"calls": 8.0, "instructions": 400}}
    found = {"commands": {"xadd": 1, "set": 1}, "requests": 0.02, "bytes": 150, "calls": 8.0, "instructions": 400}
    assert over_budget(found, allowed) == ["1 set per job, 0 allowed"]
    assert over_budget({**found, "commands": {"xadd": 2}}, allowed) == ["2 xadd per job, 1 allowed"]
    assert over_budget({**found, "commands": {"xadd": 1}, "requests": 1.02}, allowed)
    assert over_budget({**found, "commands": {"xadd": 1}, "calls": 9.0}, allowed)
    assert over_budget({**found, "commands": {"xadd": 1}, "bytes": 170}, allowed)
    assert not over_budget({**found, "commands": {"xadd": 1}, "bytes": 170}, allowed, RUNS_IN_THREADS[0])
    more_requests = {"requests": 0.22, "bytes": 170}
    assert not over_budget({**found, "commands": {"xadd": 1}, **more_requests}, allowed)
    assert not over_budget({**found, "commands": {"xadd": 1}}, allowed)
