"""The shop's queues and tasks, written as in any application."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from typing import TYPE_CHECKING, Any

from tampu.consume.handlers import UnrecoverableError
from tampu.queue import Queue
from tampu.wire.retry import BackoffSpec

if TYPE_CHECKING:
    from tampu.task import Task


class PaymentError(Exception):
    """The payment provider did not answer."""


class Shop:
    """Five queues and their tasks. `hour_secs` is the duration of one hour of the shop's day."""

    def __init__(self, url: str, hour_secs: float) -> None:
        self.orders = Queue("orders", url=url)
        self.payments = Queue("payments", url=url)
        self.emails = Queue("emails", url=url)
        self.images = Queue("images", url=url)
        self.reports = Queue("reports", url=url)
        self.queues = [self.orders, self.payments, self.emails, self.images, self.reports]
        #: Set by the script of the day: all payments fail while it is true.
        self.payment_is_down = False
        #: Number of jobs added, by task name.
        self.added: dict[str, int] = {}
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
            self._count("ask_for_review")
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

        self.place_order: Task[..., Any] = place_order
        self.charge: Task[..., Any] = charge
        self.receipt: Task[..., Any] = receipt
        self.ask_for_review: Task[..., Any] = ask_for_review
        self.newsletter: Task[..., Any] = newsletter
        self.thumbnail: Task[..., Any] = thumbnail
        self.sales_report: Task[..., Any] = sales_report

    async def add(self, task: Task[..., Any], *args: Any) -> None:
        """Add one job and count it."""
        self._count(task.name)
        await task.add(*args)

    async def add_many(self, task: Task[..., Any], items: list[Any]) -> None:
        """Add many jobs in one call and count them."""
        self._count(task.name, len(items))
        await task.add_bulk(items)

    def _count(self, name: str, count: int = 1) -> None:
        self.added[name] = self.added.get(name, 0) + count

    async def close(self) -> None:
        """Close all queues."""
        for queue in self.queues:
            await queue.close()
