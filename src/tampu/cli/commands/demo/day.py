"""What happens on the shop's day, and when: an hour takes a second."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Protocol

from tampu.cli.units import plural

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.cli.commands.demo.shop import Shop
    from tampu.cli.commands.demo.tally import Tally

OPENS_AT = 9.0
CLOSES_AT = 17.0
#: Orders in an hour and more at noon, letters of the newsletter, photos of the supplier, reports of the day.
ORDERS_PER_HOUR = 14
LUNCHTIME_ORDERS = 5
NEWSLETTERS = 5000
PHOTOS = 150
REPORTS = 3
CUSTOMERS = ("ada", "grace", "alan", "edsger", "barbara", "donald", "margaret", "tony", "radia", "linus")

#: Nobody waits longer than so many hours for the queues to run empty.
PATIENCE_HOURS = 8.0


class Teller(Protocol):
    """Who is told the story."""

    def __call__(self, at_hour: float, text: str, style: str = "") -> None:
        """One thing that happens."""


class DayClock:
    """The shop's clock; it starts with the first look at it."""

    def __init__(self, hour_secs: float) -> None:
        self.hour_secs = hour_secs
        self._opened_at = time.monotonic()

    @property
    def hour(self) -> float:
        """The hour of the day, such as 9.5."""
        return OPENS_AT + (time.monotonic() - self._opened_at) / self.hour_secs

    async def until(self, hour: float) -> None:
        """Wait for an hour of the day."""
        await asyncio.sleep(max((hour - self.hour) * self.hour_secs, 0))


def clock_text(hour: float) -> str:
    """`13:30`."""
    return f"{int(hour) % 24:02d}:{int(hour % 1 * 60):02d}"


async def live_a_day(shop: Shop, clock: DayClock, tally: Tally, tell: Teller) -> int:
    """The day from nine to the evening; how many dead letters were replayed."""
    tell(OPENS_AT, "The shop opens. One worker serves five queues; every 3 hours a report is due.")
    await shop.sales_report.every(2.5 * clock.hour_secs, limit=REPORTS)
    await shop.sales_report.cron("0 18 * * *", tz="America/Lima", key="evening report")
    async with asyncio.TaskGroup() as group:
        group.create_task(_customers(shop, clock))
        group.create_task(_newsletter(shop, clock, tell))
        group.create_task(_outage(shop, clock, tally, tell))
        group.create_task(_photos(shop, clock, tell))
    tell(clock.hour, "The shop closes. What is under way is finished: retries, delayed e-mails.")
    await _until_quiet(tally, clock)
    return await _replay(shop, clock, tally, tell)


async def _customers(shop: Shop, clock: DayClock) -> None:
    chance = random.Random(7)
    order = 1000
    while clock.hour < CLOSES_AT:
        order += 1
        await shop.add(shop.place_order, order, chance.choice(CUSTOMERS), round(chance.uniform(5, 200), 2))
        await asyncio.sleep(clock.hour_secs * chance.expovariate(ORDERS_PER_HOUR))


async def _newsletter(shop: Shop, clock: DayClock, tell: Teller) -> None:
    await clock.until(10.5)
    started = time.perf_counter()
    await shop.add_many(shop.newsletter, [f"customer-{number}@example.com" for number in range(NEWSLETTERS)])
    took_ms = (time.perf_counter() - started) * 1000
    tell(clock.hour, f"The newsletter: {NEWSLETTERS:,} e-mails added in one call, in {took_ms:.0f} ms.", "cyan")


async def _outage(shop: Shop, clock: DayClock, tally: Tally, tell: Teller) -> None:
    await clock.until(12.0)
    shop.payment_is_down = True
    tell(
        clock.hour, "The payment provider is down: charges are retried, those without luck become dead letters.", "red"
    )
    for number in range(LUNCHTIME_ORDERS):
        await shop.add(shop.place_order, 2000 + number, CUSTOMERS[number], 20.0)
    await clock.until(13.5)
    # On a busy machine an hour is over before all have had their four attempts.
    await _until(lambda: tally.by_queue["payments"]["dlq"] >= LUNCHTIME_ORDERS, clock)
    shop.payment_is_down = False
    tell(clock.hour, "The payment provider is back.", "green")


async def _photos(shop: Shop, clock: DayClock, tell: Teller) -> None:
    await clock.until(14.0)
    paths = [f"/photos/{number:04d}.jpg" for number in range(PHOTOS - 1)]
    await shop.add_many(shop.thumbnail, [*paths, "/photos/corrupt.jpg"])
    tell(
        clock.hour, f"{PHOTOS} photos from the supplier; one of them is no photo, which no retry will change.", "yellow"
    )


async def _until_quiet(tally: Tally, clock: DayClock) -> None:
    """Until nothing waits, runs or is delayed."""

    async def is_quiet() -> bool:
        # Twice: between two looks at different queues a job may have gone from one to the other.
        for _ in range(2):
            await tally.look()
            if not tally.is_quiet:
                return False
        return True

    await _until(is_quiet, clock)


async def _until(condition: Callable[[], bool | Awaitable[bool]], clock: DayClock) -> None:
    """Until something holds, but not for ever: a demo comes to its end."""
    patience = time.monotonic() + PATIENCE_HOURS * max(clock.hour_secs, 1.0)
    while time.monotonic() < patience:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.05)


async def _replay(shop: Shop, clock: DayClock, tally: Tally, tell: Teller) -> int:
    letters = await shop.payments.peek_dlq(1000)
    if letters:
        tally.example_job = tally.id_of_letter(letters[0])
    count = await shop.payments.replay_dlq(1000)
    tell(
        clock.hour,
        f"In the evening the {plural(count, 'dead payment')} are replayed, now that they can succeed.",
        "cyan",
    )
    await _until_quiet(tally, clock)
    # The last payments ask for reviews too, in their time.
    tell(clock.hour, "All is done.", "green")
    return int(count)
