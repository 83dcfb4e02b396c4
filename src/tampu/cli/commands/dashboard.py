"""`tampu dashboard`: serves the web interface of the queues."""

import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import Url
from tampu.cli.output import say, write_line
from tampu.inspect.admin import operator_name

#: Requests that are served at the same time; further ones get 503.
MAX_REQUESTS = 200


def dashboard(
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8266,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let operators pause, replay, cancel, purge and so on.")
    ] = False,
    auth: Annotated[
        Path | None,
        typer.Option(
            "--auth", metavar="FILE", dir_okay=False, help="Ask for a password: lines name:viewer|operator:password."
        ),
    ] = None,
    trusted_header: Annotated[
        str | None,
        typer.Option("--trusted-header", metavar="NAME", help="Trust the name that a proxy puts into this header."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option("--operator", metavar="NAME", help="With --trusted-header: a user who may act. Repeatable."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="HOST", help="Serve this Host header too, such as ops.example.com."),
    ] = None,
    hide_payloads: Annotated[bool, typer.Option("--hide-payloads", help="Show no payloads and results.")] = False,
    open_payloads: Annotated[
        bool, typer.Option("--open-payloads", help="Let operators open sealed payloads; each one is audited.")
    ] = False,
    url: Url = None,
) -> None:
    """Serve a web interface of the queues: what waits, what failed and why, and actions that ask first.

    It listens on 127.0.0.1 and prints a URL with a token. Other addresses need --auth or --trusted-header.
    """
    from tampu.dashboard.access import Access, Authorize, ByHeader, ByPassword, ByToken

    if auth is not None and trusted_header is not None:
        raise UsageError("--auth and --trusted-header exclude each other")
    if operator and trusted_header is None:
        raise UsageError("--operator needs --trusted-header; with --auth, the file says who may act")
    if not _is_loopback(host) and auth is None and trusted_header is None:
        raise UsageError(f"anyone who reaches {host} could read the queues: pass --auth or --trusted-header")
    authorize: Authorize
    token = ""
    if auth is not None:
        authorize = ByPassword(auth)
    elif trusted_header is not None:
        authorize = ByHeader(trusted_header, operator or [])
    else:
        authorize = by_token = ByToken(Access(operator_name(), "operator" if allow_actions else "viewer"))
        token = by_token.token
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    hosts = _hosts(host, bound, allowed_host or [])
    serve(listener, {
        "url": url,
        "authorize": authorize,
        "allow_actions": allow_actions,
        "redact": _hide if hide_payloads else None,
        "open_payloads": open_payloads,
        "hosts": hosts,
    }, f"http://{_in_url(host)}:{bound}/" + (f"?token={token}" if token else ""))  # fmt: skip


def serve(listener: socket.socket, options: dict[str, Any], address: str) -> None:
    """Serve the dashboard on a bound socket until SIGINT or SIGTERM."""
    import uvicorn

    from tampu.dashboard import dashboard as make

    app = make(options.pop("url"), **options)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_REQUESTS,
        timeout_graceful_shutdown=2,
    )
    write_line(f"dashboard: {address}")
    if not options["allow_actions"]:
        say("read-only: --allow-actions lets operators change queues")
    uvicorn.Server(config).run(sockets=[listener])


def _hide(kind: str, value: Any) -> Any:
    return "(hidden)" if kind in ("payload", "result") else value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _hosts(host: str, port: int, allowed: list[str]) -> set[str]:
    """Return the Host headers that are served: the address itself and what was allowed, with and without the port."""
    names = {_in_url(host), *allowed}
    if _is_loopback(host):
        names |= {"127.0.0.1", "localhost", "[::1]"}
    return {each.lower() for name in names for each in (name, f"{name}:{port}")}


def _listen(host: str, port: int) -> socket.socket:
    """Return a bound socket: bound before anything else is started, so that a port in use is one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # so that the URL can be opened as soon as it is printed
    except OSError as error:
        listener.close()
        why = error.strerror or error
        raise CliError(f"cannot listen on {_in_url(host)}:{port}: {why}; choose another --port") from error
    return listener
