"""The ASGI application: routes, answers as HTML and JSON, and what every request is checked for."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, quote, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tampu import version
from tampu.base.units import plural
from tampu.dashboard.access import FORM_COOKIE, HEADERS, Access, refusal_of_post, who
from tampu.dashboard.html import FILTERS
from tampu.dashboard.watch import AWAY, Watch
from tampu.errors import ConfigError
from tampu.inspect.admin import QueueAdmin
from tampu.inspect.registry import ServerView
from tampu.inspect.views import jsonable, opens_sealed, redact_also
from tampu.redis.calls import INSPECT_SCRIPTS
from tampu.redis.faults import ServerError
from tampu.redis.settings import parse_url, resolve_url
from tampu.wire.keys import QueueKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    from starlette.requests import Request

    from tampu.dashboard.access import Authorize
    from tampu.inspect.clusters import Causes

#: How long an answer is shared by all who ask for the same, in seconds, and how many answers are kept.
SHARE_SECS = 2.0
MAX_SHARED = 200
#: How long the server may take for one page, and for one action, in seconds.
PAGE_SECS = 2.0
ACT_SECS = 10.0
#: Largest form and longest query, in bytes.
MAX_FORM_BYTES = 64 * 1024
MAX_QUERY_BYTES = 8 * 1024
#: Pages that show what was looked at last while the server is away.
KEEPS_SHOWING = "queues.html"

_HERE = Path(__file__).parent
_FILES = {"dash.css": "text/css", "dash.js": "text/javascript", "mark.svg": "image/svg+xml"}


class NotFound(Exception):  # noqa: N818 - what happened, not a kind of error
    """There is no such page, queue or job: the text says what."""


class TooLarge(Exception):  # noqa: N818
    """The query or the form is too large."""


@dataclass(slots=True)
class Page:
    """What a page shows: values for its template, and the same for a program."""

    template: str
    title: str
    #: Which entry of the menu it belongs to.
    menu: str
    json: Any
    values: dict[str, Any] = field(default_factory=dict)
    status: int = 200


class Shared(NamedTuple):
    """An answer as bytes."""

    status: int
    media: str
    body: bytes
    zipped: bytes
    tag: str


class Ask:
    """One request, and what a page needs to answer it."""

    def __init__(self, board: Dashboard, request: Request, access: Access) -> None:
        self.board = board
        self.watch = board.watch
        self.access = access
        self.root = request.scope.get("root_path", "").rstrip("/")
        self.query: dict[str, str] = dict(request.query_params)
        self.path = request.url.path
        self.here = self.path + (f"?{request.url.query}" if request.url.query else "")
        self.wants_json = "application/json" in request.headers.get("accept", "") or self.query.get("format") == "json"

    @property
    def may_act(self) -> bool:
        """Return True if this user may change something."""
        return self.board.allow_actions and self.access.role == "operator"

    def at(self, path: str = "", **query: Any) -> str:
        """Return the address of a page of this dashboard. Names and IDs are in the query: they may contain slashes."""
        given = {key.strip("_"): value for key, value in query.items() if value not in (None, "")}
        text = urlencode(given, quote_via=quote, errors="surrogateescape", doseq=True)
        return f"{self.root}/{path}" + (f"?{text}" if text else "")

    async def admin(self, name: str | None = None) -> QueueAdmin:
        """Return the admin object of the queue that the query names. Raises `NotFound` if it does not exist."""
        name = self.query.get("q", "") if name is None else name
        try:
            keys = QueueKeys(name)
        except ConfigError as error:
            raise NotFound(f"no queue {name!r}: {error}") from None
        admin = QueueAdmin(await self.board.view.client(name), keys, operator=self.access.name)
        if name not in self.watch.glances and not await admin.exists():
            raise NotFound(f"no queue {name!r}")
        return admin

    def queue_names(self) -> list[str]:
        """Return the names of all queues."""
        return sorted(self.watch.glances)


class Dashboard:
    """The state that all requests share: connections, the poller, answers and groups of dead letters."""

    def __init__(
        self,
        url: str | None,
        authorize: Authorize,
        allow_actions: bool,
        redact: Callable[[str, Any], Any] | None,
        open_payloads: bool,
        hosts: Collection[str],
    ) -> None:
        self.settings = parse_url(resolve_url(url))
        self.view = ServerView(self.settings, INSPECT_SCRIPTS if allow_actions else ())
        self.watch = Watch(self.view)
        self.allow_actions = allow_actions
        self.open_payloads = open_payloads
        self.causes: dict[str, Causes] = {}
        self._authorize = authorize
        self._redact = redact
        self._hosts = frozenset(hosts)
        self._shared: dict[tuple[Any, ...], tuple[float, asyncio.Task[Shared]]] = {}
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        self.templates.filters.update(FILTERS)
        self.templates.globals.update(plural=plural, zip=zip)
        self._files = {name: (_HERE / "static" / name).read_bytes() for name in _FILES}
        #: Part of the addresses of style and script, so that a new version is loaded at once.
        self._stamp = hashlib.sha256(b"".join(self._files.values())).hexdigest()[:8]

    @property
    def place(self) -> str:
        """Return the server's address without the password."""
        kind = self.settings.kind
        return "the embedded server" if kind == "embedded" else ", ".join(map(str, self.settings.addresses))

    # --- requests

    async def enter(self, request: Request) -> Access | Response:
        """Return who sends a request, or the response that refuses it."""
        if self._hosts and request.headers.get("host", "").lower() not in self._hosts:
            # A name that an attacker lets point to this machine (DNS rebinding) must not reach it.
            return _plain(f"421: this dashboard does not serve {request.headers.get('host')!r}", 421)
        if len(request.url.query) > MAX_QUERY_BYTES:
            return _plain("413: the query is too long", 413)
        redact_also.set(self._redact)
        opens_sealed.set(False)
        return await who(self._authorize, request)

    def get(self, page: Callable[[Ask], Awaitable[Page]], *, is_shared: bool = True) -> Callable[..., Any]:
        """Return the endpoint of a page. All who may do the same share its answer for two seconds."""

        async def answer(request: Request) -> Response:
            access = await self.enter(request)
            if isinstance(access, Response):
                return access
            await self.watch.ready()
            ask = Ask(self, request, access)
            if not is_shared:
                return self._response(request, await self._render(page, ask))
            key = (ask.root, ask.here, ask.wants_json, ask.may_act)
            until, task = self._shared.get(key, (0.0, None))
            now = time.monotonic()
            if task is None or now >= until:
                self._shared = {key: kept for key, kept in self._shared.items() if kept[0] > now}
                while len(self._shared) >= MAX_SHARED:
                    self._shared.pop(next(iter(self._shared)))
                task = asyncio.create_task(self._render(page, ask))
                self._shared[key] = (now + SHARE_SECS, task)
            return self._response(request, await asyncio.shield(task))

        return answer

    async def _render(self, page: Callable[[Ask], Awaitable[Page]], ask: Ask) -> Shared:
        try:
            if self.watch.fault and not (self.watch.glances and ask.path.rstrip("/") == ask.root):
                raise TimeoutError(self.watch.fault)
            async with asyncio.timeout(PAGE_SECS):
                found = await page(ask)
        except (NotFound, ConfigError) as error:
            found = _problem(404, "Not found", str(error))
        except ServerError as error:
            found = _problem(200, "Unreadable", f"The server refused to read this: {error}")
        except AWAY as error:
            found = _problem(503, "No connection to the server", str(error) or "It did not answer in time.")
        return self.rendered(ask, found)

    def rendered(self, ask: Ask, page: Page) -> Shared:
        """Return a page as bytes."""
        if ask.wants_json:
            text, media = json.dumps(jsonable(page.json), allow_nan=False), "application/json"
        else:
            common = {
                "at": ask.at,
                "here": ask.here,
                "menu": page.menu,
                "title": page.title,
                "may_act": ask.may_act,
                "may_look_only": not self.allow_actions,
                "watch": self.watch,
                "now_ms": self.watch.now_ms,
                "place": self.place,
                "stamp": self._stamp,
                "version": version(),
                "total_dead": sum(one.dead for one in self.watch.glances.values()),
                "done": ask.query.get("done", "")[:200],
            }
            template = self.templates.get_template(page.template)
            text, media = template.render(common | page.values), "text/html; charset=utf-8"
        body = text.encode(errors="backslashreplace")
        return Shared(page.status, media, body, gzip.compress(body, 4), hashlib.sha256(body).hexdigest()[:24])

    def _response(self, request: Request, found: Shared) -> Response:
        headers = {"etag": f'"{found.tag}"', "vary": "accept, accept-encoding, cookie"}
        if found.status == 200 and request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(found.body, found.status, headers, found.media)
        return Response(found.zipped, found.status, headers | {"content-encoding": "gzip"}, found.media)

    def post(self, act: Callable[[Ask, dict[str, list[str]]], Awaitable[Page | str]]) -> Callable[..., Any]:
        """Return the endpoint of the actions. `act` returns a page, or the address to go to."""

        async def answer(request: Request) -> Response:
            access = await self.enter(request)
            if isinstance(access, Response):
                return access
            try:
                form = await _form(request)
            except TooLarge:
                return _plain("413: the form is too large", 413)
            if why := refusal_of_post(request, form):
                return _plain(f"403: {why}", 403)
            ask = Ask(self, request, access)
            if not ask.may_act:
                return _plain(f"403: {access.name} may look, and not act", 403)
            await self.watch.ready()
            ask.query = {name: values[0] for name, values in form.items()}
            try:
                async with asyncio.timeout(ACT_SECS):
                    done = await act(ask, form)
                    await self.watch.renew(ask.query.get("q", ""))
            except (NotFound, ConfigError) as error:
                done = _problem(404, "Nothing was changed", str(error))
            except ServerError as error:
                done = _problem(409, "The server refused", str(error))
            except AWAY as error:
                done = _problem(503, "No connection to the server", f"It may have been done, or not. {error}")
            self._shared.clear()
            if isinstance(done, str):
                return RedirectResponse(done, 303)
            return self._response(request, self.rendered(ask, done))

        return answer

    def form_token(self, request: Request) -> str:
        """Return the value that the form and the cookie of a browser share."""
        return request.cookies.get(FORM_COOKIE) or secrets.token_urlsafe(16)

    async def file(self, request: Request) -> Response:
        """Answer with the style, the script or the icon: they are public."""
        name = request.path_params["name"]
        if name not in self._files:
            return _plain("404: no such file", 404)
        # The address has a stamp of the content.
        return Response(self._files[name], headers={"cache-control": "max-age=86400"}, media_type=_FILES[name])


class _Checked:
    """Adds the safety headers to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_checked(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] += [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
                ]
            await send(message)

        await self._app(scope, receive, send_checked if scope["type"] == "http" else send)


def dashboard(
    url: str | None = None,
    *,
    authorize: Authorize,
    allow_actions: bool = False,
    redact: Callable[[str, Any], Any] | None = None,
    open_payloads: bool = False,
    hosts: Collection[str] = (),
) -> Starlette:
    """Return the dashboard as an ASGI application, to mount in another one or to serve.

    Args:
        url: Server URL. Defaults to `TAMPU_URL`, then to `redis://127.0.0.1:6379`.
        authorize: Called with each request (a Starlette `Request`). Returns `Access(name, role)`, a response such as a
            redirect to a login page, or None to refuse it. May be a coroutine function.
        allow_actions: Let users with the role `operator` change queues. Defaults to False: there is no such address.
        redact: Called with the kind (`payload`, `result`, `error`, `traceback`) and each value before it is shown or
            searched; returns what to show. It is called after the hook in `TAMPU_REDACT`.
        open_payloads: Let operators open sealed payloads with the codec of the environment, one by one; each is
            audited. Defaults to False.
        hosts: Values of the `Host` header that are served. Defaults to all: the application around it checks them.
    """
    from tampu.dashboard import actions
    from tampu.dashboard.pages import dead, job, jobs, lists, queue, queues, search

    if not callable(authorize):
        raise ConfigError("dashboard needs authorize, a function that returns Access(name, role) or None for a request")
    board = Dashboard(url, authorize, allow_actions, redact, open_payloads, hosts)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await board.watch.close()
        await board.view.close()

    pages = {
        "/": queues.page,
        "/queue": queue.page,
        "/jobs": jobs.page,
        "/job": job.page,
        "/dead": dead.page,
        "/workers": lists.workers,
        "/schedules": lists.schedules,
        "/events": lists.events,
        "/search": search.page,
    }
    routes = [Route(path, board.get(page), methods=["GET"]) for path, page in pages.items()]
    if allow_actions:
        routes.append(Route("/confirm", actions.confirm(board), methods=["GET"]))
        routes.append(Route("/act", board.post(actions.act), methods=["POST"]))
    routes.append(Route("/static/{name}", board.file, methods=["GET"]))
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_middleware(_Checked)
    app.state.board = board
    return app


async def _form(request: Request) -> dict[str, list[str]]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise TooLarge
    with contextlib.suppress(ValueError):
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=500)
    return {}


def _problem(status: int, title: str, text: str) -> Page:
    return Page("problem.html", title, "", {"error": text}, {"text": text, "status": status}, status)


def _plain(text: str, status: int) -> Response:
    return Response(f"{text}\n".encode(errors="backslashreplace"), status, media_type="text/plain")
