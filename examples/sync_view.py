"""Add jobs from synchronous code: a WSGI view, as in Django or Flask. `task.sync` needs no event loop.

python examples/sync_view.py            # sends requests to itself
python examples/sync_view.py serve      # http://127.0.0.1:8000/?to=ada@example.com

Run a worker with `tampu worker examples.sync_view:queue` or, as here, in a thread.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import make_server
from wsgiref.util import setup_testing_defaults

from tampu import EncodeError, Queue, Worker

# One per process: threads share its connection, and forked children (gunicorn, uwsgi) reconnect.
queue = Queue("emails", url=os.environ.get("TAMPU_URL", "embedded://"))


@queue.task
async def welcome(to: str) -> str:
    return f"sent to {to}"


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Handle a request. In Django this is `def signup(request)`; only the line with `.sync` is specific to tampu."""
    to: Any = parse_qs(environ.get("QUERY_STRING", "")).get("to", [None])[0]
    try:
        job = welcome.sync.add(to)
    except EncodeError as error:
        start_response("400 Bad Request", [("Content-Type", "text/plain")])
        return [str(error).encode()]
    result = job.result(timeout=10)  # most views return job.id instead, for queue.sync.get_job(id) later
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [result.encode()]


def ask(query: str) -> str:
    """Call the application as a server does."""
    environ: dict[str, Any] = {"QUERY_STRING": query}
    setup_testing_defaults(environ)
    said: list[str] = []
    body = b"".join(application(environ, lambda status, headers: said.append(status)))
    return f"{said[0]}: {body.decode()}"


if __name__ == "__main__":
    worker = Worker(queue)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(worker.run(),))
    thread.start()
    try:
        if sys.argv[1:] == ["serve"]:
            make_server("127.0.0.1", 8000, application).serve_forever()
        print(ask("to=ada@example.com"))
        print(ask(""))
    finally:
        asyncio.run_coroutine_threadsafe(worker.close(), loop).result()
        thread.join()
        loop.close()
        queue.sync.close()
