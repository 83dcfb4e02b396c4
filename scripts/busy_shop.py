"""Keeps a small shop busy, for pictures of the dashboard: payments fail, a queue is paused, another has no worker.

python scripts/busy_shop.py embedded:///tmp/shop
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
from datetime import timedelta

from tampu import Queue, UnrecoverableError, Worker


class PaymentError(Exception):
    """The bank did not answer."""


async def main(url: str) -> None:
    logging.getLogger("tampu").setLevel(logging.CRITICAL)
    names = ("orders", "payments", "emails", "images", "exports", "legacy-sync")
    orders, payments, emails, images, exports, legacy = queues = [Queue(name, url=url) for name in names]
    chance = random.Random(2026)

    @orders.task
    async def place_order(order: int, customer: str) -> str:
        await asyncio.sleep(chance.uniform(0.005, 0.03))
        return f"order {order} is packed"

    @payments.task(attempts=3, backoff=timedelta(seconds=2))
    async def charge(order: int, customer: str, euros: float) -> dict[str, float]:
        await asyncio.sleep(chance.uniform(0.01, 0.08))
        if chance.random() < 0.25:
            raise PaymentError(f"503 Service Unavailable from api.bank.example after {chance.randint(20, 90)} ms")
        if chance.random() < 0.01:
            raise UnrecoverableError(f"card of {customer!r} is expired")
        return {"paid": euros}

    @emails.task
    async def receipt(to: str, order: int) -> None:
        await asyncio.sleep(0.005)

    @images.task(attempts=1)
    async def thumbnail(path: str) -> None:
        await asyncio.sleep(chance.uniform(0.01, 0.4))
        if path.endswith("7.jpg"):
            raise ValueError(f"{path} is not a JPEG")

    for number in range(381):
        await legacy.add("sync", {"row": number})
    for number in range(12):
        await exports.add("export", {"month": number + 1})
    await exports.pause(reason="until the new bucket is ready")
    for number in range(40):
        await receipt.add_in(3600 + 60 * number, f"customer-{number}@example.com", number)
    await receipt.cron("0 9 * * *", {"to": "staff@example.com", "order": 0}, tz="America/Lima", key="morning")
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with Worker([orders, payments, emails, images], concurrency=30):
        order = 0
        while not over.is_set():
            order += 1
            customer = chance.choice(("ada", "grace", "alan", "barbara"))
            await place_order.add(order, customer)
            await charge.add(order, customer, round(chance.uniform(5, 200), 2))
            await receipt.add(f"{customer}@example.com", order)
            if order % 4 == 0:
                await thumbnail.add(f"/photos/{order // 4:05d}.jpg")
            await asyncio.sleep(chance.uniform(0.02, 0.2))
    for queue in queues:
        await queue.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
