"""`tampu add`: adds a job and optionally waits for its result."""

import json
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any

import typer

from tampu.cli.commands.worker.targets import load
from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import QueueName
from tampu.cli.output import say, show, write_json
from tampu.cli.payloads import one_line
from tampu.cli.redact import redacted
from tampu.cli.session import CommonOptions, Session
from tampu.cli.units import parse_duration
from tampu.errors import Error, JobCancelled, JobFailed
from tampu.queue import Queue
from tampu.worker import Worker


def add(
    common: CommonOptions,
    queue: QueueName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Job name, which is the name of its task.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="Payload: the task's arguments as JSON; - reads stdin.")
    ] = "{}",
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="DURATION", help="Run the job after this long (90s, 15m, 2h).")
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Job ID. A second add with the same ID within an hour is ignored."),
    ] = None,
    attempts: Annotated[int | None, typer.Option("--attempts", min=1, help="Maximum number of attempts.")] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="APP:QUEUE",
            help="Check the arguments against the task in this module, and use its options and the queue's server.",
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option("--wait", metavar="DURATION", help="Wait up to this long for the result and print it."),
    ] = None,
) -> None:
    """Add a job and print its ID.

    With --app, the arguments are checked and the task's options apply, as if the app had added the job:
    `tampu add emails welcome '{"to": "ada@example.com"}' --app app:queue`.
    """
    value = parse_json(sys.stdin.read() if payload == "-" else payload)
    options: dict[str, Any] = {"job_id": job_id, "attempts": attempts}
    if delay is not None:
        options["delay"] = timedelta(seconds=parse_duration(delay))
    wait_secs = None if wait is None else parse_duration(wait)
    known = None if app is None else _app_queue(app, queue)
    if known is not None and common.url is None:
        common = replace(common, url=known.url)
    try:
        told = common.run(_add, queue, known, name, value, options, wait_secs)
    except TypeError as error:
        if isinstance(error, Error):
            raise
        # The payload does not fit the task.
        raise UsageError(str(error)) from error
    if common.as_json:
        write_json(told)
    else:
        show(told["id"])
        if "result" in told:
            show(one_line(told["result"], limit=10_000))
    if not told["is_new"]:
        say(f"a job with the ID {told['id']} was added before; nothing was added", "yellow")


def _app_queue(app: str, name: str) -> Queue:
    """Return the queue of this name in an app."""
    found = load([app])
    queues = found.queues if isinstance(found, Worker) else found
    for queue in queues:
        if queue.name == name:
            return queue
    raise UsageError(f"{app} has no queue {name!r}; it has {', '.join(queue.name for queue in queues)}")


async def _add(
    session: Session,
    queue_name: str,
    known: Queue | None,
    name: str,
    value: Any,
    options: dict[str, Any],
    wait_secs: float | None,
) -> dict[str, Any]:
    queue = await session.new_queue(queue_name, strict=known is not None)
    if known is not None:
        queue.tasks = known.tasks
    job = await queue.add(name, value, **options)
    told = {"id": str(job.id), "is_new": getattr(job.id, "is_new", True), "queue": queue_name, "name": name}
    if wait_secs is not None:
        try:
            told["result"] = redacted("result", await job.result(wait_secs))
        except (JobFailed, JobCancelled) as error:
            error.args = (str(redacted("error", str(error))),)
            raise
        except TimeoutError as error:
            raise CliError(str(error)) from error
    return told


def parse_json(text: str) -> Any:
    """Parse strict JSON: NaN and Infinity are refused, because other JSON parsers reject them."""

    def refuse(constant: str) -> Any:
        raise UsageError(f"the payload contains {constant}, which is not valid JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UsageError(
            f"the payload is not valid JSON: {error.msg} at character {error.pos + 1} of {shown!r}"
        ) from error
    except RecursionError as error:
        raise UsageError("the payload is nested too deeply to parse") from error
