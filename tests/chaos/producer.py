"""A producer process of the fleet: records each request and its answer. Its plan is in `CHAOS_PLAN`.

It ends when it has confirmed its share of jobs, or when its standard input ends. The lines `pause` and `resume` on its
standard input suspend it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.records import Recorder
from tampu import Queue
from tampu.base.event_loop import new_event_loop
from tampu.errors import OutcomeUnknownError, QueueFullError, RedisError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu import Job

#: What a plain job does, and its frequency per thousand jobs.
COMMON = [("ok", 880), ("result", 20), ("nap", 80), ("fail:1", 10), ("fail:2", 5), ("never", 3), ("give-up", 2)]
#: Handlers that misbehave, used in turn, each with the task that runs it.
RARE = [
    ("die-once", "work"),
    ("hang", "hurried"),
    ("raise:SystemExit", "work"),
    ("raise:KeyboardInterrupt", "in_thread"),
    ("block:700", "work"),
    ("thread:300", "in_thread"),
    ("process", "in_process"),
    ("raise:GeneratorExit", "work"),
    ("process-exit", "in_process"),
    ("raise:BaseException", "work"),
    ("process-hang", "in_process"),
    ("long", "work"),
    ("die", "work"),
]
#: Maximum number of jobs in one window of a bulk add.
WINDOW_JOBS = 256
#: Interval between two adds with an explicit ID, in seconds.
UNIQUE_SECS = 0.2
#: Interval between two jobs that are added and cancelled, in seconds.
CANCEL_SECS = 0.1
#: Interval at which a paused producer checks whether it may resume, in seconds.
PAUSE_SECS = 0.1
#: Duration of the long jobs that are added regularly, so that every fault finds jobs in flight, in milliseconds.
LONG_MS = 1500


class Producer:
    """Adds jobs of every form, at a steady rate."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.name: str = plan["name"]
        self.random = random.Random(plan["seed"])
        self.records = Recorder(Path(plan["folder"]) / "records", self.name)
        self.confirmed = 0
        self.stopping = threading.Event()
        self.is_paused = False
        self._numbers = 0
        self._next_rare = time.monotonic() + self.plan["rare_secs"]
        self._next_long = self._next_unique = self._next_cancel = time.monotonic()
        self._rare = self.random.randrange(len(RARE))
        wanted = plan["rare"]
        self._rare_kinds = [one for one in RARE if wanted is None or one[0].partition(":")[0] in wanted]

    def token(self) -> str:
        self._numbers += 1
        return f"{self.name}-{self._numbers}"

    async def run(self) -> None:
        plan = self.plan
        settings = {"max_stream_len": plan["max_stream_len"], "overflow": plan["overflow"], "retry_for_secs": 5}
        settings["dedup_ttl_secs"] = plan["kept_secs"]
        if plan["min_replicas"]:
            settings |= {"min_replicas": 1, "min_replicas_timeout_ms": 2000}
        # A producer that replaces a killed one adds the remaining jobs.
        now = time.monotonic()
        rate = plan["jobs"] / plan["seconds"]
        ends_at = plan["began"] + plan["seconds"]
        jobs = rate * max(ends_at - now, 0)
        async with Queue(plan["queue"], url=plan["url"], **settings) as queue:
            while not self.stopping.is_set() and (self.confirmed < jobs or time.monotonic() < ends_at):
                if self.is_paused:
                    await asyncio.sleep(PAUSE_SECS)
                    now += PAUSE_SECS  # do not catch up on the pause
                    continue
                if time.monotonic() >= self._next_long:
                    self._next_long = time.monotonic() + plan["long_secs"]
                    await self.add_rare(queue, f"nap:{LONG_MS}", "work")
                if time.monotonic() >= self._next_unique:
                    self._next_unique = time.monotonic() + UNIQUE_SECS
                    await self.add_unique(queue)
                if time.monotonic() >= self._next_cancel:
                    self._next_cancel = time.monotonic() + CANCEL_SECS
                    await self.add_and_cancel(queue)
                if time.monotonic() >= self._next_rare and self._rare_kinds:
                    self._next_rare = time.monotonic() + self.plan["rare_secs"]
                    self._rare += 1
                    await self.add_rare(queue, *self._rare_kinds[self._rare % len(self._rare_kinds)])
                if self.confirmed >= (time.monotonic() - now) * rate:
                    await asyncio.sleep(0.01)
                    continue
                await self.one_step(queue)

    async def one_step(self, queue: Queue) -> None:
        step = self.random.random()
        if step < 0.80:
            await self.add_bulk(queue)
        elif step < 0.90:
            await asyncio.gather(*(self.add_one(queue) for _ in range(self.random.randint(1, 20))))
        else:
            await self.add_delayed(queue)

    def common(self) -> str:
        do = self.random.choices([do for do, _ in COMMON], [weight for _, weight in COMMON])[0]
        return f"nap:{self.random.choice((5, 50, 200, 1000))}" if do == "nap" else do

    async def add_bulk(self, queue: Queue) -> None:
        jobs = [(self.token(), self.common()) for _ in range(self.random.randint(1, 600))]
        attempts = self.random.choice((None, None, None, 1, 2))
        by_do: dict[str, list[str]] = {}
        for token, do in jobs:
            by_do.setdefault(do, []).append(token)
        for do, tokens in by_do.items():
            self.records.write("ask", attempts or 3, do, "-", *tokens)
        if attempts is not None:
            # With options, each job of a bulk is a separate add with its own answer.
            adds = (self.answered([token], self._adder(queue, token, do, attempts)) for token, do in jobs)
            await asyncio.gather(*adds)
            return
        entries = [{"name": "work", "data": {"token": token, "do": do}} for token, do in jobs]
        await self.answered([token for token, _ in jobs], lambda: queue.add_bulk(entries))

    def _adder(self, queue: Queue, token: str, do: str, attempts: int) -> Callable[[], Awaitable[Any]]:
        return lambda: queue.add("work", {"token": token, "do": do}, attempts=attempts)

    async def add_one(self, queue: Queue) -> None:
        token, do, attempts = self.token(), self.common(), self.random.choice((1, 2, 5))
        self.records.write("ask", attempts, do, "-", token)
        await self.answered([token], self._adder(queue, token, do, attempts))

    async def add_delayed(self, queue: Queue) -> None:
        token, do = self.token(), self.common()
        self.records.write("ask", 3, do, "-", token)
        delay_ms = self.random.randint(1, 3000)
        await self.answered([token], lambda: queue.add("work", {"token": token, "do": do}, delay_ms=delay_ms))

    async def add_unique(self, queue: Queue) -> None:
        # All producers choose from the same few IDs at a time, so several producers add most of them.
        token, job_id = self.token(), f"u{int(time.monotonic())}-{self.random.randrange(3)}"
        self.records.write("ask", 3, "ok", job_id, token)
        await self.answered([token], lambda: queue.add_unique("work", {"token": token, "do": "ok"}, job_id=job_id))

    async def add_and_cancel(self, queue: Queue) -> None:
        """Add a job and cancel it while it is delayed, waiting, running or waiting for a retry."""
        token, do = self.token(), self.random.choice(("ok", "nap:1000", "nap:3000", "never"))
        delay_ms = self.random.choice((None, 50, 3000))
        self.records.write("ask", 3, do, "-", token)
        added: list[Job[Any]] = []

        async def add() -> Any:
            added.append(await queue.add("work", {"token": token, "do": do}, delay_ms=delay_ms))
            return added[0]

        await self.answered([token], add)
        await asyncio.sleep(self.random.choice((0, 0.05, 0.2)))
        for job in added:
            self.records.write("cancel", token)
            with contextlib.suppress(RedisError):
                outcome = await queue.cancel(job.id, reason="chaos")
                if outcome in ("cancelled", "requested"):
                    self.records.write(outcome, token)

    async def add_rare(self, queue: Queue, do: str, task: str) -> None:
        token, attempts = self.token(), 3
        if do == "long":
            do = f"nap:{int(self.plan['lease_ms'] * self.random.uniform(1.1, 2))}"
        if do == "die" and (self.random.random() < 0.75 or not self.plan["poison"]):
            attempts = 1
        if do.startswith("process"):
            attempts = 20  # a child that cannot start, because no file descriptor is left, uses up an attempt
        self.records.write("ask", attempts, do, "-", token)
        await self.answered([token], lambda: queue.add(task, {"token": token, "do": do}, attempts=attempts))

    async def answered(self, tokens: list[str], add: Callable[[], Awaitable[Any]]) -> None:
        """Add, and record the answer."""
        try:
            job = await add()
        except QueueFullError as full:
            added = len(full.accepted)
            if len(tokens) <= WINDOW_JOBS:
                self.answer("ok", tokens[:added])
                self.answer("refused", tokens[added:])
            else:
                self.answer("unknown", tokens)  # each window accepts its own first jobs
            await asyncio.sleep(0.1)
        except OutcomeUnknownError:
            self.answer("unknown", tokens)
        except RedisError as error:
            # Earlier windows may have been applied: only a single add is known to be rejected as a whole.
            self.answer("refused" if len(tokens) == 1 else "unknown", tokens)
            logging.warning("refused: %s", error)
            await asyncio.sleep(0.1)
        else:
            is_known = not isinstance(job, list) and not job.id.is_new
            self.answer("known" if is_known else "ok", tokens)

    def answer(self, how: str, tokens: list[str]) -> None:
        if tokens:
            self.records.write(how, *tokens)
        if how in ("ok", "known"):
            self.confirmed += len(tokens)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    producer = Producer(json.loads(os.environ["CHAOS_PLAN"]))

    def obey() -> None:
        with contextlib.suppress(OSError):
            for line in sys.stdin:
                producer.is_paused = line.strip() == "pause"
        producer.stopping.set()

    threading.Thread(target=obey, daemon=True).start()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(producer.run())


if __name__ == "__main__":
    main()
