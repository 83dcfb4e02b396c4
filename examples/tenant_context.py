"""A tenant that travels with its jobs: from the context of the add to the context of the run, in any kind of task.

python examples/tenant_context.py
"""

import asyncio
import os
from contextvars import ContextVar
from typing import Any

from tampu import Job, JobId, Middleware, PendingAdd, Queue, Worker
from tampu.middleware import NextAdd, NextRun

tenant: ContextVar[str] = ContextVar("tenant")


class Tenant(Middleware):
    async def on_add(self, call_next: NextAdd, add: PendingAdd) -> list[JobId]:
        add.headers["tenant"] = tenant.get()  # without a tenant, a LookupError refuses the add
        return await call_next(add)

    async def on_run(self, call_next: NextRun, job: Job[Any]) -> Any:
        tenant.set(job.headers["tenant"])
        return await call_next(job)


queue = Queue("invoices", url=os.environ.get("TAMPU_URL", "embedded://"), middleware=[Tenant()])


@queue.task
async def invoice(number: int) -> str:
    return f"invoice {number} of {tenant.get()}"


@queue.task
def invoice_in_thread(number: int) -> str:
    return f"invoice {number} of {tenant.get()}, in a thread"


@queue.task(process=True)
def invoice_in_process(number: int) -> str:
    return f"invoice {number} of {tenant.get()}, in a process"


async def main() -> None:
    async with queue, Worker(queue):
        for name, task in (("acme", invoice), ("zeta", invoice_in_thread), ("acme", invoice_in_process)):
            tenant.set(name)
            print(await (await task.add(7)).result())


if __name__ == "__main__":
    asyncio.run(main())
