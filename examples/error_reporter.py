"""An error tracker as a middleware: breadcrumbs from every run, a report once a job is given up.

python examples/error_reporter.py

With Sentry, `report` is `sentry_sdk.capture_exception(end.error)`, inside of a scope with these tags.
"""

import asyncio
import os
from datetime import timedelta
from typing import Any

from tampu import Job, JobEnd, JobFailed, Middleware, Queue, Worker
from tampu.middleware import NextRun


class ErrorReporter(Middleware):
    async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
        try:
            return await call_next(job)
        except Exception as error:
            print(f"breadcrumb: attempt {job.attempt + 1} of {job.name}: {error}")
            raise

    async def on_end(self, end: JobEnd) -> None:
        if end.kind == "retried":
            print(f"again in {end.retry_in:.1f} s")
        elif end.kind == "dead":
            await self.report(end)

    async def report(self, end: JobEnd) -> None:
        tags = {"queue": end.queue, "task": end.job.name, "reason": end.reason}
        print(f"report: {type(end.error).__name__}: {end.error} {tags}")


queue = Queue("payments", url=os.environ.get("TAMPU_URL", "embedded://"), middleware=[ErrorReporter()])


@queue.task(attempts=2, backoff=timedelta(milliseconds=100))
async def pay(amount: int) -> str:
    if amount > 100:
        raise ConnectionError("the bank is closed")
    return f"paid {amount}"


async def main() -> None:
    async with queue, Worker(queue):
        print(await (await pay.add(5)).result())
        try:
            await (await pay.add(500)).result()
        except JobFailed as failed:
            print(f"failed: {failed.reason}")


if __name__ == "__main__":
    asyncio.run(main())
