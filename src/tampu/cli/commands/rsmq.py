"""`tampu rsmq ...`: commands for RSMQ queues (Redis Simple Message Queue), shared with JavaScript and Rust clients.

```
tampu rsmq create mail --vt 60
tampu rsmq send mail "hello" && tampu rsmq receive mail --json
tampu rsmq bridge mail emails      # old producers keep working while you move the workers to tampu
```
"""

import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import typer
from typer import Argument, Option

from tampu.base.units import plural
from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import Confirmation
from tampu.cli.output import cell, say, show, while_read, write_json, write_json_line, write_line
from tampu.cli.session import CommonOptions, run
from tampu.cli.tables import table
from tampu.config import DEFAULT_DEDUP_TTL_SECS, ProducerConfig
from tampu.produce.options import AddOptions
from tampu.produce.producer import Producer
from tampu.redis.settings import resolve_url
from tampu.rsmq import QueueAttributes, Rsmq, RsmqError, RsmqMessage, RsmqOptions, errors
from tampu.rsmq.bridge import DEFAULT_BATCH, DEFAULT_VT_SECS, Bridge
from tampu.rsmq.queues import DEFAULT_MAXSIZE
from tampu.rsmq.receive import DEFAULT_POLL_SECS

T = TypeVar("T")

Decode = Literal["text", "json", "bytes"]

app = typer.Typer(
    name="rsmq",
    help="Use RSMQ queues (Redis Simple Message Queue), shared with JavaScript and Rust clients.",
    no_args_is_help=True,
)

#: Errors about the arguments of a call, rather than a queue or a server.
_USAGE = (
    *(errors.InvalidFormat, errors.InvalidValue, errors.MessageNotString),
    *(errors.MissingParameter, errors.NoAttributeSupplied),
)

_option, _argument = partial(Option, show_default=False), partial(Argument, show_default=False)
_seconds = partial(_option, metavar="SECONDS")

Qname = Annotated[str, _argument(metavar="QUEUE", help="RSMQ queue name.")]
Vt = Annotated[str | None, _seconds("--vt", help="Visibility timeout. Default: the queue's own.")]
Delay = Annotated[str | None, _seconds("--delay", help="Delay before delivery. Default: the queue's own.")]


@dataclass(frozen=True)
class Namespace(CommonOptions):
    """Options of every `rsmq` command."""

    ns: Annotated[str, Option(envvar="TAMPU_RSMQ_NS", metavar="NS", help="Key prefix; use {rsmq} on a Cluster.")] = (
        "rsmq"
    )
    #: An option of the commands that read or write durations.
    unit: ClassVar[Literal["s", "ms"]] = "s"

    def call(self, qname: str, work: Callable[[Rsmq], Awaitable[T]], *, realtime: bool = False) -> T:
        """Run `work` with a client and return its result; errors become one line for the user."""
        settings = RsmqOptions(url=resolve_url(self.url), ns=self.ns, duration_unit=self.unit, realtime=realtime)
        options = replace(settings, patience_secs=self.timeout)

        async def open_and_work() -> T:
            rsmq = Rsmq(options)  # connects on its first call, so invalid arguments are reported without a server
            try:
                return await work(rsmq)
            finally:
                await rsmq.close()

        try:
            return run(open_and_work())
        except RsmqError as error:
            text = ": ".join([str(error), *getattr(error, "__notes__", [])])
            if isinstance(error, _USAGE):
                raise UsageError(text) from error
            raise CliError(f"{text} ({qname})") from error

    def print_lines(self, value: Any, lines: list[str]) -> None:
        """Print what was found, as JSON or as lines."""
        if self.as_json:
            write_json(value)
            return
        for line in lines:
            write_line(line)

    def print_messages(self, messages: list[RsmqMessage[str]]) -> None:
        """Print messages: as text lines, or as one JSON list."""
        self.print_lines([message_as_json(message) for message in messages], [_line(message) for message in messages])


@dataclass(frozen=True)
class NamespaceAndUnit(Namespace):
    """Options of commands that read or write a queue's durations."""

    unit: Annotated[  # type: ignore[misc]  # an instance's value instead of the class's
        Literal["s", "ms"],
        Option(
            "--duration-unit",
            envvar="TAMPU_RSMQ_DURATION_UNIT",
            help="Unit of the stored vt and delay. The Rust client uses ms.",
        ),
    ] = "s"


def show_attributes(attributes: QueueAttributes, as_json: bool) -> None:
    """Print the attributes of a queue."""
    fields = asdict(attributes)
    if as_json:
        write_json(fields)
        return
    suspicious = fields.pop("looks_like_milliseconds")
    shown = table("attribute", "value", numbers=("value",))
    for name, value in fields.items():
        shown.add_row(cell(name), cell(value))
    show(shown)
    if suspicious:
        say("vt or delay look like milliseconds, as written by Rust's rsmq_async; see --duration-unit")


def message_as_json(message: RsmqMessage[str]) -> dict[str, Any]:
    """Return a message with RSMQ's field names; a body that is not UTF-8 is added as bytes."""
    fields = {"id": message.id, "message": message.message, "rc": message.rc, "fr": message.fr, "sent": message.sent}
    if message.message.encode() != message.body:
        fields["body"] = message.body
    return fields


def _line(message: RsmqMessage[str]) -> str:
    return f"{message.id} {message.message}"


# --- queues


@app.command()
def create(
    place: NamespaceAndUnit,
    qname: Qname,
    vt: Annotated[str, Option(metavar="SECONDS", help="Visibility timeout of received messages.")] = "30",
    delay: Annotated[str, Option(metavar="SECONDS", help="Delay of new messages.")] = "0",
    maxsize: Annotated[
        int, Option(metavar="BYTES", help="Maximum message size: 1024 to 65536, or -1 for no limit.")
    ] = DEFAULT_MAXSIZE,
) -> None:
    """Create a queue."""
    place.call(qname, lambda rsmq: rsmq.create_queue(qname, vt, delay, maxsize))
    place.report({"queue": qname, "created": True}, f"created {qname}")


@app.command("list")
def list_queues(place: Namespace) -> None:
    """List all queues."""
    names = place.call("", lambda rsmq: rsmq.list_queues())
    place.print_lines(names, names)
    if not names and not place.as_json:
        say(f"no queues in namespace {place.ns}")


@app.command()
def delete(place: Namespace, qname: Qname, confirmation: Confirmation) -> None:
    """Delete a queue and all its messages."""
    attributes = place.call(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    held = plural(attributes.msgs, "message")
    is_confirmed = confirmation.ask(f"delete {qname} permanently, with {held}", 1)
    if is_confirmed:
        place.call(qname, lambda rsmq: rsmq.delete_queue(qname))
    report = {"queue": qname, "messages": attributes.msgs, "deleted": is_confirmed}
    place.report(report, f"deleted {qname}" if is_confirmed else "")


@app.command()
def attrs(place: NamespaceAndUnit, qname: Qname) -> None:
    """Show the attributes and counters of a queue."""
    attributes = place.call(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    show_attributes(attributes, place.as_json)


@app.command("set")
def set_attributes(
    place: NamespaceAndUnit,
    qname: Qname,
    vt: Annotated[str | None, _seconds(help="New visibility timeout.")] = None,
    delay: Annotated[str | None, _seconds(help="New delay.")] = None,
    maxsize: Annotated[int | None, _option(metavar="BYTES", help="New maximum message size.")] = None,
) -> None:
    """Change the attributes of a queue. Messages already in it keep their delay and visibility timeout."""
    show_attributes(place.call(qname, lambda rsmq: rsmq.set_queue_attributes(qname, vt, maxsize, delay)), place.as_json)


# --- messages


@app.command()
def send(
    place: NamespaceAndUnit,
    qname: Qname,
    message: Annotated[str, Argument(metavar="MESSAGE", help="Message body; - reads stdin.")] = "-",
    delay: Delay = None,
    lines: Annotated[bool, Option("--lines", help="Send each line of stdin as one message.")] = False,
    realtime: Annotated[bool, Option("--realtime", help="Notify listeners.")] = False,
) -> None:
    """Send a message, or each line of stdin with --lines, and print the IDs."""
    if lines and message != "-":
        raise UsageError("--lines reads messages from stdin: leave out MESSAGE")
    body = sys.stdin.buffer.read() if message == "-" else message.encode(errors="surrogateescape")
    bodies = body.splitlines() if lines else [body]
    ids = place.call(qname, lambda rsmq: rsmq.send_messages(qname, bodies, delay), realtime=realtime)
    place.print_lines([{"id": each} for each in ids] if lines else {"id": ids[0]}, ids)


@app.command()
def receive(
    place: NamespaceAndUnit,
    qname: Qname,
    vt: Vt = None,
    limit: Annotated[int, Option("--max", "-n", min=1, metavar="N", help="Maximum number of messages.")] = 1,
) -> None:
    """Receive messages, or print nothing if there are none.

    Each message is delivered again after its visibility timeout, unless it is acked.
    """
    place.print_messages(place.call(qname, lambda rsmq: rsmq.receive_messages(qname, limit, vt)))


@app.command()
def pop(place: Namespace, qname: Qname) -> None:
    """Receive the next message and delete it. Prints nothing if the queue is empty."""
    found = place.call(qname, lambda rsmq: rsmq.pop_message(qname))
    place.print_messages([found] if found else [])


@app.command()
def ack(
    place: Namespace, qname: Qname, ids: Annotated[list[str], _argument(metavar="ID...", help="Message IDs.")]
) -> None:
    """Delete messages that have been handled."""
    deleted = place.call(qname, lambda rsmq: rsmq.delete_messages(qname, ids))
    place.report({"deleted": deleted}, f"deleted {deleted} of {len(ids)}")
    if not deleted:
        raise CliError(f"no such message in {qname}; it was already acked or popped")


@app.command()
def visibility(
    place: NamespaceAndUnit,
    qname: Qname,
    message_id: Annotated[str, _argument(metavar="ID", help="Message ID.")],
    vt: Annotated[str, _argument(metavar="SECONDS", help="Hide the message for this long; 0 makes it visible.")],
) -> None:
    """Change a message's visibility timeout, counted from now."""
    if not place.call(qname, lambda rsmq: rsmq.change_message_visibility(qname, message_id, vt)):
        raise CliError(f"no such message in {qname}: {message_id}")
    place.report({"id": message_id, "vt": vt}, f"{message_id} hidden for {vt} s")


@app.command()
def listen(
    place: NamespaceAndUnit,
    qname: Qname,
    vt: Vt = None,
    limit: Annotated[int, Option("--max", "-n", min=0, metavar="N", help="Exit after N messages; 0 = never.")] = 0,
    acks: Annotated[bool, Option("--ack", help="Delete each message once it is printed.")] = False,
    poll: Annotated[
        float, Option(min=0.01, metavar="SECONDS", help="Poll interval when no notification arrives.")
    ] = DEFAULT_POLL_SECS,
) -> None:
    """Print messages as they arrive, until Ctrl-C. --json prints one JSON object per line."""

    async def print_all(rsmq: Rsmq) -> None:
        count = 0
        await rsmq.get_queue_attributes(qname)  # fail early: a listener would wait for a missing server
        async with contextlib.aclosing(rsmq.listen(qname, vt, poll_secs=poll)) as messages:
            async for message in messages:
                write_json_line(message_as_json(message)) if place.as_json else write_line(_line(message))
                # Delete only after writing: if the reader is gone, the message must not be lost.
                if acks:
                    await rsmq.delete_message(qname, message.id)
                count += 1
                if count == limit:
                    return

    place.call(qname, lambda rsmq: while_read(print_all(rsmq)))


@app.command()
def bridge(
    place: NamespaceAndUnit,
    source: Annotated[str, _argument(metavar="SRC_QUEUE", help="RSMQ queue.")],
    destination: Annotated[str, _argument(metavar="DEST_QUEUE", help="tampu queue.")],
    name: Annotated[str, Option(metavar="NAME", help="Name of the jobs.")] = "",
    decode: Annotated[Decode, Option(help="How to decode a message body into a payload.")] = "text",
    drain: Annotated[bool, Option("--drain", help="Exit when no messages are left.")] = False,
    batch: Annotated[int, Option(min=1, max=256, metavar="N", help="Messages per batch.")] = DEFAULT_BATCH,
    vt: Annotated[
        int, Option(min=1, metavar="SECONDS", help="Visibility timeout while a message is moved.")
    ] = DEFAULT_VT_SECS,
    dedup_ttl: Annotated[
        int, Option(min=1, metavar="SECONDS", help="How long to remember the IDs of moved messages.")
    ] = DEFAULT_DEDUP_TTL_SECS,
    dest_url: Annotated[str | None, _option(metavar="URL", help="Server of DEST_QUEUE, if different.")] = None,
) -> None:
    """Move messages from an RSMQ queue to a tampu queue, until Ctrl-C.

    Delivery is at least once: a message is deleted after it has been added as a job.

    Its ID becomes the job's ID, so a message moved again after a crash is not added twice within --dedup-ttl.
    """
    config = ProducerConfig(queue_name=destination, overflow="wait", dedup_ttl_secs=dedup_ttl)

    async def move(rsmq: Rsmq) -> None:
        await rsmq.get_queue_attributes(source)  # report a missing queue before anything is moved
        producer: Producer[Any]
        async with Producer.connect(dest_url or resolve_url(place.url), config) as producer:
            moving = Bridge(rsmq, source, TampuInlet(producer, name, decode), batch=batch, vt_secs=vt)
            try:
                await (moving.drain() if drain else moving.run())
            finally:
                moved = f"moved {plural(moving.moved, 'message')} to {destination}"
                place.print_lines({"moved": moving.moved}, [moved])

    place.call(source, move)


class TampuInlet:
    """Adds messages to a tampu queue under their own IDs, so that a repeated message is added once."""

    def __init__(self, producer: Producer[Any], name: str = "", decode: Decode = "text") -> None:
        self._producer = producer
        self._name = name
        self._decode = decode

    async def add(self, message_id: str, body: bytes) -> None:
        """Add one message; it is stored on the server when this returns."""
        await self._producer.add_with_options(self._payload(body), AddOptions(id=message_id, name=self._name))

    def _payload(self, body: bytes) -> Any:
        # A body that cannot be decoded as requested is passed on as text or bytes rather than lost.
        if self._decode == "json":
            with contextlib.suppress(ValueError):
                return json.loads(body)
        if self._decode != "bytes":
            with contextlib.suppress(UnicodeDecodeError):
                return body.decode()
        return body
