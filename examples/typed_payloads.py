"""Typed arguments and results: checked when a job is added, and converted back to their types.

python examples/typed_payloads.py
"""

import asyncio
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID, uuid4

from tampu import EncodeError, Queue, Worker

queue = Queue("billing", url=os.environ.get("TAMPU_URL", "embedded://"))


@dataclass
class Line:
    article: str
    price: Decimal
    count: int = 1


@dataclass
class Invoice:
    id: UUID
    lines: list[Line]
    due: datetime


@dataclass
class Receipt:
    invoice: UUID
    total: Decimal


@queue.task
async def charge(invoice: Invoice) -> Receipt:
    return Receipt(invoice.id, sum((line.price * line.count for line in invoice.lines), Decimal(0)))


async def main() -> None:
    async with queue, Worker(queue):
        invoice = Invoice(uuid4(), [Line("tea", Decimal("3.50"), 2), Line("cake", Decimal("4.20"))], datetime.now(UTC))
        job = await charge.add(invoice)
        receipt = await job.result(timeout=10)
        print(f"{type(receipt).__name__}: {receipt.total}, for the same invoice: {receipt.invoice == invoice.id}")

        try:
            await charge.add("not an invoice")  # type: ignore[arg-type]  # type checkers report this too
        except EncodeError as error:
            print("refused:", error)


if __name__ == "__main__":
    asyncio.run(main())
