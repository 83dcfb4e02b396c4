"""The shop of `tampu demo`: its queues and tasks, written as in any application, and the script of its day.

An hour of the day takes one second.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tampu.base.units import plural
from tampu.consume.handlers import UnrecoverableError
from tampu.queue import Queue
from tampu.wire.envelope import decode_job
from tampu.wire.retry import BackoffSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tampu.cli.commands.demo_view import Story, Tally
    from tampu.task import Task

OPENS_AT = 9.0
CLOSES_AT = 17.0
#: Orders per hour and extra orders at noon, newsletter emails, photos from the supplier, reports per day.
ORDERS_PER_HOUR = 14
LUNCHTIME_ORDERS = 5
NEWSLETTERS = 5000
PHOTOS = 150
REPORTS = 3
CUSTOMERS = ("ada", "grace", "alan", "edsger", "barbara", "donald", "margaret", "tony", "radia", "linus")

#: Maximum wait for the queues to become empty, in hours of the shop's day.
PATIENCE_HOURS = 8.0


class PaymentError(Exception):
    """The payment provider did not answer."""


class Shop:
    """Five queues and their tasks. `hour_secs` is the duration of one hour of the shop's day."""

    def __init__(self, url: str, hour_secs: float) -> None:
        self.queues = [Queue(name, url=url) for name in ("orders", "payments", "emails", "images", "reports")]
        self.orders, self.payments, self.emails, self.images, self.reports = self.queues
        #: Set by the script of the day: all payments fail while it is true.
        self.payment_is_down = False
        #: Number of jobs added, by task name.
        self.added: Counter[str] = Counter()
        self.euros = 0.0
        chance = random.Random(2026)
        patience = BackoffSpec.exponential(max(round(90 * hour_secs), 1), jitter_ms=max(round(60 * hour_secs), 1))

        @self.orders.task
        async def place_order(order: int, customer: str, euros: float) -> str:
            await asyncio.sleep(0.01)  # check the stock
            await self.add(self.charge, order, customer, euros)
            return f"order {order} is packed"

        @self.payments.task(attempts=4, backoff=patience, timeout=5)
        async def charge(order: int, customer: str, euros: float) -> str:
            await asyncio.sleep(0.02)
            if self.payment_is_down or chance.random() < 0.25:
                raise PaymentError("503 Service Unavailable")
            self.euros += euros
            await self.add(self.receipt, customer, order)
            # A delayed job: ask for a review when the parcel has arrived.
            self.added["ask_for_review"] += 1
            await self.ask_for_review.add_in(1.2 * hour_secs, customer, order)
            return f"{euros:.2f} EUR from {customer}"

        @self.emails.task
        async def receipt(to: str, order: int) -> None:
            await asyncio.sleep(0.005)

        @self.emails.task
        async def ask_for_review(to: str, order: int) -> None:
            await asyncio.sleep(0.005)

        @self.emails.task
        async def newsletter(to: str) -> None:
            pass  # handed to the mail server

        @self.images.task
        def thumbnail(path: str, pixels: int = 200) -> str:  # no `async`: runs in a thread
            if "corrupt" in path:
                raise UnrecoverableError(f"{path} is not a JPEG")
            time.sleep(0.004)
            return hashlib.sha256(path.encode()).hexdigest()[:8]

        @self.reports.task
        async def sales_report() -> dict[str, Any]:
            return {"euros": round(self.euros, 2)}

        self.place_order, self.charge, self.sales_report = place_order, charge, sales_report
        self.receipt, self.ask_for_review, self.newsletter = receipt, ask_for_review, newsletter
        self.thumbnail = thumbnail

    async def add(self, task: Task[..., Any], *args: Any) -> None:
        """Add one job and count it."""
        self.added[task.name] += 1
        await task.add(*args)

    async def add_many(self, task: Task[..., Any], items: list[Any]) -> None:
        """Add many jobs in one call and count them."""
        self.added[task.name] += len(items)
        await task.add_bulk(items)

    async def close(self) -> None:
        """Close all queues."""
        for queue in self.queues:
            await queue.close()


# --- the day


class DayClock:
    """The shop's clock; it starts when it is created."""

    def __init__(self, hour_secs: float) -> None:
        self.hour_secs = hour_secs
        self._opened_at = time.monotonic()

    @property
    def hour(self) -> float:
        """Return the hour of the day, such as 9.5."""
        return OPENS_AT + (time.monotonic() - self._opened_at) / self.hour_secs

    async def until(self, hour: float) -> None:
        """Wait until an hour of the day."""
        await asyncio.sleep(max((hour - self.hour) * self.hour_secs, 0))


def clock_text(hour: float) -> str:
    """Format an hour of the day as `13:30`."""
    return f"{int(hour) % 24:02d}:{int(hour % 1 * 60):02d}"


async def live_a_day(shop: Shop, clock: DayClock, tally: Tally, tell: Story) -> int:
    """Run the day from opening to the evening; return the number of dead letters replayed."""
    tell(OPENS_AT, "The shop opens: one worker, five queues, and a sales report every 2.5 hours.")
    await shop.sales_report.every(2.5 * clock.hour_secs, limit=REPORTS)
    await shop.sales_report.cron("0 18 * * *", tz="America/Lima", key="evening report")
    async with asyncio.TaskGroup() as group:
        group.create_task(_customers(shop, clock))
        group.create_task(_newsletter(shop, clock, tell))
        group.create_task(_outage(shop, clock, tally, tell))
        group.create_task(_photos(shop, clock, tell))
    tell(clock.hour, "The shop closes. The worker finishes retries and delayed emails.")
    await _until_quiet(tally, clock)
    return await _replay(shop, clock, tally, tell)


async def _customers(shop: Shop, clock: DayClock) -> None:
    chance = random.Random(7)
    order = 1000
    while clock.hour < CLOSES_AT:
        order += 1
        await shop.add(shop.place_order, order, chance.choice(CUSTOMERS), round(chance.uniform(5, 200), 2))
        await asyncio.sleep(clock.hour_secs * chance.expovariate(ORDERS_PER_HOUR))


async def _newsletter(shop: Shop, clock: DayClock, tell: Story) -> None:
    await clock.until(10.5)
    started = time.perf_counter()
    await shop.add_many(shop.newsletter, [f"customer-{number}@example.com" for number in range(NEWSLETTERS)])
    took_ms = (time.perf_counter() - started) * 1000
    tell(clock.hour, f"Newsletter: {NEWSLETTERS:,} emails added in one call, in {took_ms:.0f} ms.", "cyan")


async def _outage(shop: Shop, clock: DayClock, tally: Tally, tell: Story) -> None:
    await clock.until(12.0)
    shop.payment_is_down = True
    tell(clock.hour, "The payment provider is down: charges are retried, then dead-lettered after 4 attempts.", "red")
    for number in range(LUNCHTIME_ORDERS):
        await shop.add(shop.place_order, 2000 + number, CUSTOMERS[number], 20.0)
    await clock.until(13.5)
    # On a busy machine, the hour may end before every charge has used its four attempts.
    await _until(lambda: tally.by_queue["payments"]["dlq"] >= LUNCHTIME_ORDERS, tally, clock)
    shop.payment_is_down = False
    tell(clock.hour, "The payment provider is back.", "green")


async def _photos(shop: Shop, clock: DayClock, tell: Story) -> None:
    await clock.until(14.0)
    paths = [f"/photos/{number:04d}.jpg" for number in range(PHOTOS - 1)]
    await shop.add_many(shop.thumbnail, [*paths, "/photos/corrupt.jpg"])
    tell(clock.hour, f"{PHOTOS} photos arrive; one is corrupt and goes straight to the dead letters.", "yellow")


async def _until_quiet(tally: Tally, clock: DayClock) -> None:
    """Wait until no job is waiting, running or delayed."""

    # Check twice: between two snapshots a job may have moved from one queue to another.
    await _until(lambda: tally.is_quiet, tally, clock, times=2)


async def _until(condition: Callable[[], bool], tally: Tally, clock: DayClock, times: int = 1) -> None:
    """Wait until the condition holds in snapshots in a row, for a limited time: the demo must end."""
    patience = time.monotonic() + PATIENCE_HOURS * max(clock.hour_secs, 1.0)
    count = 0
    while count < times and time.monotonic() < patience:
        await tally.take_snapshots()
        count = count + 1 if condition() else 0
        await asyncio.sleep(0.05)


async def _replay(shop: Shop, clock: DayClock, tally: Tally, tell: Story) -> int:
    letters = await shop.payments.peek_dlq(1000)
    if letters:
        tally.example_job = decode_job(letters[0]["payload"]).id
    count = await shop.payments.replay_dlq(1000)
    tell(clock.hour, f"Evening: {plural(count, 'dead payment')} replayed, now that the provider is back.", "cyan")
    await _until_quiet(tally, clock)
    # The replayed payments add review requests too, which are delayed.
    tell(clock.hour, "All jobs are done.", "green")
    return int(count)
