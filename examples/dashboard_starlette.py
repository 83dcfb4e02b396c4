"""The dashboard mounted in a Starlette application, behind its own login. Needs httpx.

python examples/dashboard_starlette.py               # sends requests to itself
uvicorn examples.dashboard_starlette:app             # serves; the dashboard is at /tampu/
"""

import asyncio
import os

from starlette.applications import Starlette
from starlette.requests import Request

from tampu import Queue
from tampu.dashboard import Access, dashboard

URL = os.environ.get("TAMPU_URL", "embedded://")
USERS = {"secret-of-ada": Access("ada", "operator"), "secret-of-bob": Access("bob", "viewer")}

queue = Queue("orders", url=URL)
app = Starlette()


def authorize(request: Request) -> Access | None:
    """Return who has this session; None refuses the request."""
    return USERS.get(request.cookies.get("session", ""))


board = dashboard(URL, authorize=authorize, allow_actions=True)
app.mount("/tampu", board)


async def main() -> None:
    import httpx

    transport = httpx.ASGITransport(app)
    closing = board.router.lifespan_context(board)  # closes its connections; in your application, part of its lifespan
    async with queue, closing, httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        await queue.add("ship", {"article": "tea"})
        print((await client.get("/tampu/")).status_code, "without a session")
        client.cookies.set("session", "secret-of-bob")
        found = await client.get("/tampu/", headers={"accept": "application/json"})
        print(found.status_code, found.json()["totals"])
        page = await client.get("/tampu/queue", params={"q": "orders"})
        print(page.status_code, "/tampu/jobs?q=orders" in page.text)


if __name__ == "__main__":
    asyncio.run(main())
