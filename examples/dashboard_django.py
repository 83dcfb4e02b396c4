"""The dashboard beside a Django application, for its staff. Needs django and httpx.

python examples/dashboard_django.py                # sends requests to itself
uvicorn examples.dashboard_django:app              # serves; the dashboard is at /tampu/
"""

import asyncio
import os

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import path
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from tampu import Queue
from tampu.dashboard import Access, dashboard

URL = os.environ.get("TAMPU_URL", "embedded://")


def home(request: HttpRequest) -> HttpResponse:
    return HttpResponse("the shop")


urlpatterns = [path("", home)]

settings.configure(
    SECRET_KEY=os.environ.get("SECRET_KEY", "only for this example"),
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()

from django.contrib.auth import aget_user  # noqa: E402 - after setup
from django.contrib.sessions.backends.signed_cookies import SessionStore  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402


async def authorize(request: Request) -> Access | None:
    """Return the user of Django's session if they are staff; None refuses the request."""
    asked = HttpRequest()
    asked.session = SessionStore(request.cookies.get(settings.SESSION_COOKIE_NAME))
    user = await aget_user(asked)
    return Access(user.get_username(), "operator") if user.is_staff else None


board = dashboard(URL, authorize=authorize, allow_actions=True)
app = Starlette(
    routes=[Mount("/tampu", board), Mount("/", get_asgi_application())],
    lifespan=lambda app: board.router.lifespan_context(board),  # closes its connections
)


async def main() -> None:
    import httpx

    transport = httpx.ASGITransport(app)
    queue = Queue("orders", url=URL)
    closing = app.router.lifespan_context(app)
    async with queue, closing, httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        await queue.add("ship", {"article": "tea"})
        print((await client.get("/")).text)
        print((await client.get("/tampu/")).status_code, "without a session")


if __name__ == "__main__":
    asyncio.run(main())
