"""Failing jobs: retries with backoff, then a dead letter that can be inspected and replayed once the cause is fixed.

python examples/retries.py
"""

import asyncio
import os
from datetime import timedelta

from tampu import BackoffSpec, JobFailed, Queue, UnrecoverableError, Worker, current_job

queue = Queue("payments", url=os.environ.get("TAMPU_URL", "embedded://"))
bank_is_open = False


@queue.task(attempts=3, backoff=BackoffSpec.fixed(timedelta(milliseconds=50), jitter_ms=0))
async def pay(amount: int) -> str:
    if amount < 0:
        raise UnrecoverableError("the amount must be positive")
    print(f"attempt {current_job().attempt + 1} of pay({amount})")
    if not bank_is_open:
        raise ConnectionError("the bank is closed")
    return f"paid {amount}"


async def main() -> None:
    global bank_is_open
    async with queue, Worker(queue):
        job = await pay.add(100)
        try:
            await job.result(timeout=10)
        except JobFailed as failed:
            print("failed:", failed.reason, "-", failed.detail)
        try:
            await (await pay.add(-1)).result(timeout=10)
        except JobFailed as failed:
            print("failed:", failed.reason, "-", failed.detail)

        bank_is_open = True
        print("replayed:", await queue.replay_dlq(reason="retries_exhausted"))
        print("result:", await job.result(timeout=10))
        print("left in the dead-letter queue:", [letter["error"] for letter in await queue.peek_dlq()])


if __name__ == "__main__":
    asyncio.run(main())
