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
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

import typer

from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, DryRun, Timeout, Url, Yes
from tampu.cli.output import cell, say, show, while_read, write_json, write_json_line, write_line
from tampu.cli.session import run
from tampu.cli.tables import table
from tampu.cli.units import plural
from tampu.config import DEFAULT_DEDUP_TTL_SECS, ProducerConfig
from tampu.produce.options import AddOptions
from tampu.produce.producer import Producer
from tampu.redis.settings import resolve_url
from tampu.rsmq import (
    InvalidFormat,
    InvalidValue,
    MessageNotString,
    MissingParameter,
    NoAttributeSupplied,
    QueueAttributes,
    Rsmq,
    RsmqError,
    RsmqMessage,
    RsmqOptions,
)
from tampu.rsmq.bridge import DEFAULT_BATCH, Bridge
from tampu.rsmq.bridge import DEFAULT_VT_SECS as DEFAULT_BRIDGE_VT_SECS
from tampu.rsmq.listen import DEFAULT_POLL_SECS
from tampu.rsmq.queues import DEFAULT_DELAY_SECS, DEFAULT_MAXSIZE, DEFAULT_VT_SECS

T = TypeVar("T")

Decode = Literal["text", "json", "bytes"]

app = typer.Typer(
    name="rsmq",
    help="Use RSMQ queues (Redis Simple Message Queue), shared with JavaScript and Rust clients.",
    no_args_is_help=True,
)

DEFAULT_NS = "rsmq"
#: Errors about the arguments of a call, rather than a queue or a server.
_USAGE = (InvalidFormat, InvalidValue, MessageNotString, MissingParameter, NoAttributeSupplied)

Qname = Annotated[str, typer.Argument(metavar="QUEUE", help="RSMQ queue name.", show_default=False)]
Ns = Annotated[
    str, typer.Option("--ns", envvar="TAMPU_RSMQ_NS", metavar="NS", help="Key prefix; use {rsmq} on a Cluster.")
]
Unit = Annotated[
    Literal["s", "ms"],
    typer.Option(
        "--duration-unit",
        envvar="TAMPU_RSMQ_DURATION_UNIT",
        help="Unit of the stored vt and delay. The Rust client uses ms.",
    ),
]
Vt = Annotated[
    str | None,
    typer.Option("--vt", metavar="SECONDS", help="Visibility timeout. Default: the queue's own.", show_default=False),
]
Delay = Annotated[
    str | None,
    typer.Option(
        "--delay", metavar="SECONDS", help="Delay before delivery. Default: the queue's own.", show_default=False
    ),
]


class Namespace:
    """Storage of RSMQ queues: base class of the two groups of options below."""

    as_json: bool
    url: str | None
    ns: str
    unit: Literal["s", "ms"] = "s"
    timeout: float

    def run(self, qname: str, work: Callable[[Rsmq], Awaitable[T]], *, realtime: bool = False) -> T:
        """Run `work` with a client and return its result; errors become one line for the user."""
        options = RsmqOptions(
            url=resolve_url(self.url),
            ns=self.ns,
            duration_unit=self.unit,
            realtime=realtime,
            patience_secs=self.timeout,
        )

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

    def tell(self, value: dict[str, Any], text: str) -> None:
        """Print what was done, as JSON or as text."""
        write_json(value) if self.as_json else write_line(text)


@dataclass(frozen=True)
class NamespaceOptions(Namespace):
    """Options of every `rsmq` command."""

    url: Url = None
    ns: Ns = DEFAULT_NS
    timeout: Timeout = DEFAULT_TIMEOUT_SECS
    as_json: AsJson = False


@dataclass(frozen=True)
class DurationOptions(Namespace):
    """Options of commands that read or write a queue's durations."""

    url: Url = None
    ns: Ns = DEFAULT_NS
    unit: Unit = "s"
    timeout: Timeout = DEFAULT_TIMEOUT_SECS
    as_json: AsJson = False


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


def message_as_line(message: RsmqMessage[str]) -> str:
    """Return a message as one line."""
    return f"{message.id} {message.message}"


def show_messages(messages: list[RsmqMessage[str]], as_json: bool) -> None:
    """Print messages: as text lines, or as one JSON list."""
    if as_json:
        write_json([message_as_json(message) for message in messages])
        return
    for message in messages:
        write_line(message_as_line(message))


# --- queues


@app.command()
def create(
    place: DurationOptions,
    qname: Qname,
    vt: Annotated[str, typer.Option("--vt", metavar="SECONDS", help="Visibility timeout of received messages.")] = str(
        DEFAULT_VT_SECS
    ),
    delay: Annotated[str, typer.Option("--delay", metavar="SECONDS", help="Delay of new messages.")] = str(
        DEFAULT_DELAY_SECS
    ),
    maxsize: Annotated[
        int, typer.Option("--maxsize", metavar="BYTES", help="Maximum message size: 1024 to 65536, or -1 for no limit.")
    ] = DEFAULT_MAXSIZE,
) -> None:
    """Create a queue."""
    place.run(qname, lambda rsmq: rsmq.create_queue(qname, vt, delay, maxsize))
    place.tell({"queue": qname, "created": True}, f"created {qname}")


@app.command("list")
def list_queues(place: NamespaceOptions) -> None:
    """List all queues."""
    names = place.run("", lambda rsmq: rsmq.list_queues())
    if place.as_json:
        write_json(names)
        return
    for name in names:
        write_line(name)
    if not names:
        say(f"no queues in namespace {place.ns}")


@app.command()
def delete(place: NamespaceOptions, qname: Qname, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete a queue and all its messages."""
    attributes = place.run(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    say(f"{qname} holds {plural(attributes.msgs, 'message')}")
    if not dry_run:
        if not yes and not sys.stdin.isatty():
            raise UsageError(
                f"this deletes {qname} and its messages permanently; not a terminal, so pass --yes to confirm"
            )
        if not yes:
            typer.confirm(f"Delete {qname} permanently?", abort=True, err=True)
        place.run(qname, lambda rsmq: rsmq.delete_queue(qname))
    text = f"would delete {qname}" if dry_run else f"deleted {qname}"
    place.tell({"queue": qname, "messages": attributes.msgs, "deleted": not dry_run}, text)


@app.command()
def attrs(place: DurationOptions, qname: Qname) -> None:
    """Show the attributes and counters of a queue."""
    attributes = place.run(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    show_attributes(attributes, place.as_json)


@app.command("set")
def set_attributes(
    place: DurationOptions,
    qname: Qname,
    vt: Annotated[
        str | None, typer.Option("--vt", metavar="SECONDS", help="New visibility timeout.", show_default=False)
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="SECONDS", help="New delay.", show_default=False)
    ] = None,
    maxsize: Annotated[
        int | None, typer.Option("--maxsize", metavar="BYTES", help="New maximum message size.", show_default=False)
    ] = None,
) -> None:
    """Change the attributes of a queue. Messages already in it keep their delay and visibility timeout."""
    show_attributes(place.run(qname, lambda rsmq: rsmq.set_queue_attributes(qname, vt, maxsize, delay)), place.as_json)


# --- messages


@app.command()
def send(
    place: DurationOptions,
    qname: Qname,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Message body; - reads stdin.")] = "-",
    delay: Delay = None,
    lines: Annotated[bool, typer.Option("--lines", help="Send each line of stdin as one message.")] = False,
    realtime: Annotated[bool, typer.Option("--realtime", help="Notify listeners.")] = False,
) -> None:
    """Send a message, or each line of stdin with --lines, and print the IDs."""
    if lines and message != "-":
        raise UsageError("--lines reads messages from stdin: leave out MESSAGE")
    body = sys.stdin.buffer.read() if message == "-" else message.encode(errors="surrogateescape")
    bodies = body.splitlines() if lines else [body]
    ids = place.run(qname, lambda rsmq: rsmq.send_messages(qname, bodies, delay), realtime=realtime)
    if place.as_json:
        write_json([{"id": each} for each in ids] if lines else {"id": ids[0]})
        return
    for each in ids:
        write_line(each)


@app.command()
def receive(
    place: DurationOptions,
    qname: Qname,
    vt: Vt = None,
    limit: Annotated[int, typer.Option("--max", "-n", min=1, metavar="N", help="Maximum number of messages.")] = 1,
) -> None:
    """Receive messages, or print nothing if there are none.

    Each message is delivered again after its visibility timeout, unless it is acked.
    """
    show_messages(place.run(qname, lambda rsmq: rsmq.receive_messages(qname, limit, vt)), place.as_json)


@app.command()
def pop(place: NamespaceOptions, qname: Qname) -> None:
    """Receive the next message and delete it. Prints nothing if the queue is empty."""
    found = place.run(qname, lambda rsmq: rsmq.pop_message(qname))
    show_messages([found] if found else [], place.as_json)


@app.command()
def ack(
    place: NamespaceOptions,
    qname: Qname,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Message IDs.", show_default=False)],
) -> None:
    """Delete messages that have been handled."""
    deleted = place.run(qname, lambda rsmq: rsmq.delete_messages(qname, ids))
    place.tell({"deleted": deleted}, f"deleted {deleted} of {len(ids)}")
    if not deleted:
        raise CliError(f"no such message in {qname}; it was already acked or popped")


@app.command()
def visibility(
    place: DurationOptions,
    qname: Qname,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Message ID.", show_default=False)],
    vt: Annotated[
        str,
        typer.Argument(
            metavar="SECONDS", help="Hide the message for this long; 0 makes it visible.", show_default=False
        ),
    ],
) -> None:
    """Change a message's visibility timeout, counted from now."""
    if not place.run(qname, lambda rsmq: rsmq.change_message_visibility(qname, message_id, vt)):
        raise CliError(f"no such message in {qname}: {message_id}")
    place.tell({"id": message_id, "vt": vt}, f"{message_id} hidden for {vt} s")


@app.command()
def listen(
    place: DurationOptions,
    qname: Qname,
    vt: Vt = None,
    limit: Annotated[
        int, typer.Option("--max", "-n", min=0, metavar="N", help="Exit after N messages; 0 = never.")
    ] = 0,
    acks: Annotated[bool, typer.Option("--ack", help="Delete each message once it is printed.")] = False,
    poll: Annotated[
        float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Poll interval when no notification arrives.")
    ] = DEFAULT_POLL_SECS,
) -> None:
    """Print messages as they arrive, until Ctrl-C. --json prints one JSON object per line."""

    async def print_all(rsmq: Rsmq) -> None:
        count = 0
        await rsmq.get_queue_attributes(qname)  # fail early: a listener would wait for a missing server
        async with contextlib.aclosing(rsmq.listen(qname, vt, poll_secs=poll)) as messages:
            async for message in messages:
                write_json_line(message_as_json(message)) if place.as_json else write_line(message_as_line(message))
                # Delete only after writing: if the reader is gone, the message must not be lost.
                if acks:
                    await rsmq.delete_message(qname, message.id)
                count += 1
                if count == limit:
                    return

    place.run(qname, lambda rsmq: while_read(print_all(rsmq)))


@app.command()
def bridge(
    place: DurationOptions,
    source: Annotated[str, typer.Argument(metavar="SRC_QUEUE", help="RSMQ queue.", show_default=False)],
    destination: Annotated[str, typer.Argument(metavar="DEST_QUEUE", help="tampu queue.", show_default=False)],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the jobs.")] = "",
    decode: Annotated[Decode, typer.Option("--decode", help="How to decode a message body into a payload.")] = "text",
    drain: Annotated[bool, typer.Option("--drain", help="Exit when no messages are left.")] = False,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=256, metavar="N", help="Messages per batch.")
    ] = DEFAULT_BATCH,
    vt: Annotated[
        int, typer.Option("--vt", min=1, metavar="SECONDS", help="Visibility timeout while a message is moved.")
    ] = DEFAULT_BRIDGE_VT_SECS,
    dedup_ttl: Annotated[
        int,
        typer.Option("--dedup-ttl", min=1, metavar="SECONDS", help="How long to remember the IDs of moved messages."),
    ] = DEFAULT_DEDUP_TTL_SECS,
    dest_url: Annotated[
        str | None,
        typer.Option("--dest-url", metavar="URL", help="Server of DEST_QUEUE, if different.", show_default=False),
    ] = None,
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
                text = f"moved {plural(moving.moved, 'message')} to {destination}"
                place.tell({"moved": moving.moved}, text)

    place.run(source, move)


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
