"""A FastAPI application that adds jobs and returns their state, with a worker. Needs fastapi and httpx.

python examples/fastapi_app.py                  # sends requests to itself
uvicorn examples.fastapi_app:app                # serves; workers: tampu worker examples.fastapi_app:queue

In production, run the worker as a separate process; here it runs in the application's event loop.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from tampu import Queue, Worker

queue = Queue("orders", url=os.environ.get("TAMPU_URL", "embedded://"))


class Order(BaseModel):
    """A pydantic model can be an argument like any other type."""

    article: str
    count: int = 1


@queue.task(attempts=5, timeout=30)
async def ship(order: Order) -> dict[str, Any]:
    return {"shipped": order.article, "count": order.count}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    async with queue, Worker(queue):  # at the end, the worker finishes its running jobs
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def add_order(order: Order) -> dict[str, str]:
    job = await ship.add(order)
    return {"job": job.id}


@app.get("/orders/{job_id}")
async def order_state(job_id: str) -> dict[str, Any]:
    state = await queue.get_job(job_id)
    if state.state == "unknown":
        raise HTTPException(404, "no such order")
    return {"state": state.state, "result": state.result}


async def main() -> None:
    import httpx

    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        added = await client.post("/orders", json={"article": "tea", "count": 3})
        print(added.status_code, "added")
        await queue.wait_for_result(added.json()["job"], timeout_secs=10)
        print((await client.get(f"/orders/{added.json()['job']}")).json())
        print((await client.get("/orders/unknown")).status_code, "for an unknown order")


if __name__ == "__main__":
    asyncio.run(main())
