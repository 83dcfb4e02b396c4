"""`tampu rsmq ...`: queues of RSMQ, the simple message queue that JavaScript and Rust share.

```
tampu rsmq create mail --vt 60
tampu rsmq send mail "hello" && tampu rsmq receive mail --json
tampu rsmq bridge mail emails      # old producers keep working while workers move over to tampu
```
"""

import contextlib
import json
import sys
from typing import Annotated, Any, Literal

import typer

from tampu.cli.commands.rsmq_session import (
    Delay,
    DurationOptions,
    NamespaceOptions,
    Qname,
    Vt,
    message_as_json,
    message_as_line,
    show_attributes,
    show_messages,
)
from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import DryRun, Yes
from tampu.cli.output import say, while_read, write_json, write_json_line, write_line
from tampu.config import DEFAULT_DEDUP_TTL_SECS, ProducerConfig
from tampu.produce.options import AddOptions
from tampu.produce.producer import Producer
from tampu.redis.settings import resolve_url
from tampu.rsmq import Rsmq
from tampu.rsmq.bridge import DEFAULT_BATCH, Bridge
from tampu.rsmq.bridge import DEFAULT_VT_SECS as DEFAULT_BRIDGE_VT_SECS
from tampu.rsmq.listen import DEFAULT_POLL_SECS
from tampu.rsmq.queues import DEFAULT_DELAY_SECS, DEFAULT_MAXSIZE, DEFAULT_VT_SECS

Decode = Literal["text", "json", "bytes"]

app = typer.Typer(
    name="rsmq",
    help="Queues of RSMQ, the simple message queue that JavaScript and Rust share.",
    no_args_is_help=True,
)


# --- queues


@app.command()
def create(
    place: DurationOptions,
    qname: Qname,
    vt: Annotated[str, typer.Option("--vt", metavar="SECONDS", help="How long a received message is hidden.")] = str(
        DEFAULT_VT_SECS
    ),
    delay: Annotated[str, typer.Option("--delay", metavar="SECONDS", help="How long a new message is hidden.")] = str(
        DEFAULT_DELAY_SECS
    ),
    maxsize: Annotated[
        int, typer.Option("--maxsize", metavar="BYTES", help="1024 to 65536, or -1 for no limit.")
    ] = DEFAULT_MAXSIZE,
) -> None:
    """Make a queue."""
    place.run(qname, lambda rsmq: rsmq.create_queue(qname, vt, delay, maxsize))
    place.tell({"queue": qname, "created": True}, f"created {qname}")


@app.command("list")
def list_queues(place: NamespaceOptions) -> None:
    """The names of all queues."""
    names = place.run("", lambda rsmq: rsmq.list_queues())
    if place.as_json:
        write_json(names)
        return
    for name in names:
        write_line(name)
    if not names:
        say(f"no queues in the namespace {place.ns}")


@app.command()
def delete(place: NamespaceOptions, qname: Qname, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete a queue with all its messages."""
    attributes = place.run(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    say(f"{qname} holds {attributes.msgs} message(s)")
    if not dry_run:
        if not yes and not sys.stdin.isatty():
            raise UsageError(f"this deletes {qname} and its messages for good: say --yes")
        if not yes:
            typer.confirm(f"Delete {qname} for good?", abort=True, err=True)
        place.run(qname, lambda rsmq: rsmq.delete_queue(qname))
    done = "would be deleted" if dry_run else "deleted"
    place.tell({"queue": qname, "messages": attributes.msgs, "deleted": not dry_run}, f"{qname} {done}")


@app.command()
def attrs(place: DurationOptions, qname: Qname) -> None:
    """The attributes and counters of a queue."""
    attributes = place.run(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    show_attributes(attributes, place.as_json)


@app.command("set")
def set_attributes(
    place: DurationOptions,
    qname: Qname,
    vt: Annotated[str | None, typer.Option("--vt", metavar="SECONDS", show_default=False)] = None,
    delay: Annotated[str | None, typer.Option("--delay", metavar="SECONDS", show_default=False)] = None,
    maxsize: Annotated[int | None, typer.Option("--maxsize", metavar="BYTES", show_default=False)] = None,
) -> None:
    """Change attributes of a queue. Messages that are in it keep their times."""
    show_attributes(place.run(qname, lambda rsmq: rsmq.set_queue_attributes(qname, vt, maxsize, delay)), place.as_json)


# --- messages


@app.command()
def send(
    place: DurationOptions,
    qname: Qname,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="The message; - reads it from the input.")] = "-",
    delay: Delay = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the input is a message.")] = False,
    realtime: Annotated[bool, typer.Option("--realtime", help="Wake those who listen.")] = False,
) -> None:
    """Send a message, or many; prints their ids."""
    if lines and message != "-":
        raise UsageError("--lines reads messages from the input: give no MESSAGE")
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
    most: Annotated[int, typer.Option("--max", "-n", min=1, metavar="N", help="Most messages to take.")] = 1,
) -> None:
    """Receive messages; each comes again after its vt unless it is acked. Prints nothing when there is none."""
    show_messages(place.run(qname, lambda rsmq: rsmq.receive_messages(qname, most, vt)), place.as_json)


@app.command()
def pop(place: NamespaceOptions, qname: Qname) -> None:
    """Take the next message out for good. Prints nothing when there is none."""
    found = place.run(qname, lambda rsmq: rsmq.pop_message(qname))
    show_messages([found] if found else [], place.as_json)


@app.command()
def ack(
    place: NamespaceOptions,
    qname: Qname,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of messages.", show_default=False)],
) -> None:
    """Delete messages that are done with."""
    deleted = place.run(qname, lambda rsmq: rsmq.delete_messages(qname, ids))
    place.tell({"deleted": deleted}, f"deleted {deleted} of {len(ids)}")
    if not deleted:
        raise CliError(f"no such message in {qname}: it was acked before, or popped")


@app.command()
def visibility(
    place: DurationOptions,
    qname: Qname,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.", show_default=False)],
    vt: Annotated[str, typer.Argument(metavar="SECONDS", help="Hide for so long; 0 shows it.", show_default=False)],
) -> None:
    """Hide a message for some time from now on."""
    if not place.run(qname, lambda rsmq: rsmq.change_message_visibility(qname, message_id, vt)):
        raise CliError(f"no such message in {qname}: {message_id}")
    place.tell({"id": message_id, "vt": vt}, f"{message_id} is hidden for {vt} s")


@app.command()
def listen(
    place: DurationOptions,
    qname: Qname,
    vt: Vt = None,
    most: Annotated[int, typer.Option("--max", "-n", min=0, metavar="N", help="End after N; 0 = never.")] = 0,
    acks: Annotated[bool, typer.Option("--ack", help="Delete each message once it is printed.")] = False,
    poll: Annotated[
        float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look so often when nothing is heard.")
    ] = DEFAULT_POLL_SECS,
) -> None:
    """Print messages as they come, until Ctrl-C; with --json one document per line."""

    async def print_all(rsmq: Rsmq) -> None:
        count = 0
        await rsmq.get_queue_attributes(qname)  # a listener would wait for a server that is not there
        async with contextlib.aclosing(rsmq.listen(qname, vt, poll_secs=poll)) as messages:
            async for message in messages:
                write_json_line(message_as_json(message)) if place.as_json else write_line(message_as_line(message))
                # After it was written: if nobody reads any more it must not be gone.
                if acks:
                    await rsmq.delete_message(qname, message.id)
                count += 1
                if count == most:
                    return

    place.run(qname, lambda rsmq: while_read(print_all(rsmq)))


@app.command()
def bridge(
    place: DurationOptions,
    source: Annotated[str, typer.Argument(metavar="SRC_QUEUE", help="The RSMQ queue.", show_default=False)],
    destination: Annotated[str, typer.Argument(metavar="DEST_QUEUE", help="The tampu queue.", show_default=False)],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the jobs.")] = "",
    decode: Annotated[Decode, typer.Option("--decode", help="What a body becomes as a payload.")] = "text",
    drain: Annotated[bool, typer.Option("--drain", help="End when nothing is left to receive.")] = False,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=256, metavar="N", help="So many at once.")
    ] = DEFAULT_BATCH,
    vt: Annotated[
        int, typer.Option("--vt", min=1, metavar="SECONDS", help="Hide a message for so long while it is moved.")
    ] = DEFAULT_BRIDGE_VT_SECS,
    dedup_ttl: Annotated[
        int, typer.Option("--dedup-ttl", min=1, metavar="SECONDS", help="Remember the ids moved for so long.")
    ] = DEFAULT_DEDUP_TTL_SECS,
    dest_url: Annotated[
        str | None,
        typer.Option("--dest-url", metavar="URL", help="The server of DEST_QUEUE, if another.", show_default=False),
    ] = None,
) -> None:
    """Move the messages of an RSMQ queue into a tampu queue, until Ctrl-C.

    At least once: a message is deleted when it has been added. Its id becomes the job's, so that a message which is
    moved a second time, after a crash in between, is not added a second time.
    """
    config = ProducerConfig(queue_name=destination, overflow="wait", dedup_ttl_secs=dedup_ttl)

    async def move(rsmq: Rsmq) -> None:
        await rsmq.get_queue_attributes(source)  # a queue that is not there is told before anything is begun
        producer: Producer[Any]
        async with Producer.connect(dest_url or resolve_url(place.url), config) as producer:
            moving = Bridge(rsmq, source, TampuInlet(producer, name, decode), batch=batch, vt_secs=vt)
            try:
                await (moving.drain() if drain else moving.run())
            finally:
                place.tell({"moved": moving.moved}, f"moved {moving.moved} message(s) to {destination}")

    place.run(source, move)


class TampuInlet:
    """Adds messages to a tampu queue, each under its own id: one that comes again is not added again."""

    def __init__(self, producer: Producer[Any], name: str = "", decode: Decode = "text") -> None:
        self._producer = producer
        self._name = name
        self._decode = decode

    async def add(self, message_id: str, body: bytes) -> None:
        """Add one; it is on the server when this returns."""
        await self._producer.add_with_options(self._payload(body), AddOptions(id=message_id, name=self._name))

    def _payload(self, body: bytes) -> Any:
        # What is not as it should be travels as what it is: better so than not at all.
        if self._decode == "json":
            with contextlib.suppress(ValueError):
                return json.loads(body)
        if self._decode != "bytes":
            with contextlib.suppress(UnicodeDecodeError):
                return body.decode()
        return body
