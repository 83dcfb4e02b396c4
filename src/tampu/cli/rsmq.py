"""`tampu rsmq ...`: queues of RSMQ, the simple message queue that JavaScript and Rust share.

    tampu rsmq create mail --vt 60
    tampu rsmq send mail "hello" && tampu rsmq receive mail --json
    tampu rsmq bridge mail emails      # old producers keep working while workers move over to tampu

Also as `python -m tampu.cli.rsmq`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tampu.cli.exits import INTERRUPTED, OK, USAGE, CliError, UsageError, exit_code_of, line_of
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, DryRun, Timeout, Url, Yes
from tampu.cli.output import printable, reader_is_gone, say, write_json, write_json_line, write_line
from tampu.cli.rsmq_bridge import bridge
from tampu.cli.rsmq_session import (
    DEFAULT_NS,
    Delay,
    Ns,
    Place,
    Qname,
    Unit,
    Vt,
    message_as_json,
    message_as_line,
    show_attributes,
    show_messages,
    tell,
)
from tampu.rsmq.listening import DEFAULT_POLL_SECS
from tampu.rsmq.queues import DEFAULT_DELAY_SECS, DEFAULT_MAXSIZE, DEFAULT_VT_SECS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tampu.rsmq import Rsmq


class QuietGroup(TyperGroup):
    """Ends a command whose reader has gone (`| head`) without a word. Left to typer, that would be an error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()  # here and not at exit, where a closed pipe would be a traceback
        except BrokenPipeError:
            # What is still in the buffer must not become an error when Python ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None
        return answer


app = typer.Typer(
    name="rsmq",
    cls=QuietGroup,
    help="Queues of RSMQ, the simple message queue that JavaScript and Rust share.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


# --- queues


@app.command()
def create(
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
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Make a queue."""
    Place(url, timeout, ns, unit).work(qname, lambda rsmq: rsmq.create_queue(qname, vt, delay, maxsize))
    tell({"queue": qname, "created": True}, f"created {qname}", as_json)


@app.command("list")
def list_queues(
    url: Url = None, ns: Ns = DEFAULT_NS, timeout: Timeout = DEFAULT_TIMEOUT_SECS, as_json: AsJson = False
) -> None:
    """The names of all queues."""
    names = Place(url, timeout, ns).work("", lambda rsmq: rsmq.list_queues())
    if as_json:
        write_json(names)
        return
    for name in names:
        write_line(name)
    if not names:
        say(f"no queues in the namespace {ns}")


@app.command()
def delete(
    qname: Qname,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete a queue with all its messages."""
    place = Place(url, timeout, ns)
    attributes = place.work(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    say(f"{qname} holds {attributes.msgs} message(s)")
    if not dry_run:
        if not yes and not sys.stdin.isatty():
            raise UsageError(f"this deletes {qname} and its messages for good: say --yes")
        if not yes:
            typer.confirm(f"Delete {qname} for good?", abort=True, err=True)
        place.work(qname, lambda rsmq: rsmq.delete_queue(qname))
    done = "would be deleted" if dry_run else "deleted"
    tell({"queue": qname, "messages": attributes.msgs, "deleted": not dry_run}, f"{qname} {done}", as_json)


@app.command()
def attrs(
    qname: Qname,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """The attributes and counters of a queue."""
    attributes = Place(url, timeout, ns, unit).work(qname, lambda rsmq: rsmq.get_queue_attributes(qname))
    show_attributes(attributes, as_json)


@app.command("set")
def set_attributes(
    qname: Qname,
    vt: Annotated[str | None, typer.Option("--vt", metavar="SECONDS", show_default=False)] = None,
    delay: Annotated[str | None, typer.Option("--delay", metavar="SECONDS", show_default=False)] = None,
    maxsize: Annotated[int | None, typer.Option("--maxsize", metavar="BYTES", show_default=False)] = None,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Change attributes of a queue. Messages that are in it keep their times."""
    place = Place(url, timeout, ns, unit)
    show_attributes(place.work(qname, lambda rsmq: rsmq.set_queue_attributes(qname, vt, maxsize, delay)), as_json)


# --- messages


@app.command()
def send(
    qname: Qname,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="The message; - reads it from the input.")] = "-",
    delay: Delay = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the input is a message.")] = False,
    realtime: Annotated[bool, typer.Option("--realtime", help="Wake those who listen.")] = False,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Send a message, or many; prints their ids."""
    if lines and message != "-":
        raise UsageError("--lines reads messages from the input: give no MESSAGE")
    body = sys.stdin.buffer.read() if message == "-" else message.encode(errors="surrogateescape")
    bodies = body.splitlines() if lines else [body]
    place = Place(url, timeout, ns, unit)
    ids = place.work(qname, lambda rsmq: rsmq.send_messages(qname, bodies, delay), realtime=realtime)
    if as_json:
        write_json([{"id": each} for each in ids] if lines else {"id": ids[0]})
        return
    for each in ids:
        write_line(each)


@app.command()
def receive(
    qname: Qname,
    vt: Vt = None,
    most: Annotated[int, typer.Option("--max", "-n", min=1, metavar="N", help="Most messages to take.")] = 1,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Receive messages; each comes again after its vt unless it is acked. Prints nothing when there is none."""
    place = Place(url, timeout, ns, unit)
    show_messages(place.work(qname, lambda rsmq: rsmq.receive_messages(qname, most, vt)), as_json)


@app.command()
def pop(
    qname: Qname,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Take the next message out for good. Prints nothing when there is none."""
    found = Place(url, timeout, ns).work(qname, lambda rsmq: rsmq.pop_message(qname))
    show_messages([found] if found else [], as_json)


@app.command()
def ack(
    qname: Qname,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of messages.", show_default=False)],
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Delete messages that are done with."""
    deleted = Place(url, timeout, ns).work(qname, lambda rsmq: rsmq.delete_messages(qname, ids))
    tell({"deleted": deleted}, f"deleted {deleted} of {len(ids)}", as_json)
    if not deleted:
        raise CliError(f"no such message in {qname}: it was acked before, or popped")


@app.command()
def visibility(
    qname: Qname,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.", show_default=False)],
    vt: Annotated[str, typer.Argument(metavar="SECONDS", help="Hide for so long; 0 shows it.", show_default=False)],
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Hide a message for some time from now on."""
    place = Place(url, timeout, ns, unit)
    if not place.work(qname, lambda rsmq: rsmq.change_message_visibility(qname, message_id, vt)):
        raise CliError(f"no such message in {qname}: {message_id}")
    tell({"id": message_id, "vt": vt}, f"{message_id} is hidden for {vt} s", as_json)


@app.command()
def listen(
    qname: Qname,
    vt: Vt = None,
    most: Annotated[int, typer.Option("--max", "-n", min=0, metavar="N", help="End after N; 0 = never.")] = 0,
    acks: Annotated[bool, typer.Option("--ack", help="Delete each message once it is printed.")] = False,
    poll: Annotated[
        float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look so often when nothing is heard.")
    ] = DEFAULT_POLL_SECS,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Print messages as they come, until Ctrl-C; with --json one document per line."""

    async def print_all(rsmq: Rsmq) -> None:
        count = 0
        await rsmq.get_queue_attributes(qname)  # a listener would wait for a server that is not there
        async with contextlib.aclosing(rsmq.listen(qname, vt, poll_secs=poll)) as messages:
            async for message in messages:
                write_json_line(message_as_json(message)) if as_json else write_line(message_as_line(message))
                # After it was written: if nobody reads any more it must not be gone.
                if acks:
                    await rsmq.delete_message(qname, message.id)
                count += 1
                if count == most:
                    return

    Place(url, timeout, ns, unit).work(qname, lambda rsmq: _while_read(print_all(rsmq)))


app.command()(bridge)


async def _while_read(printing: Coroutine[Any, Any, None]) -> None:
    """Print until done, or until nobody reads any more."""
    tasks = [asyncio.create_task(printing), asyncio.create_task(reader_is_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        printed, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(printed, Exception):
        raise printed


def main() -> None:
    """What `python -m tampu.cli.rsmq` runs."""
    code = OK
    try:
        answer = app(sys.argv[1:], prog_name="tampu rsmq", standalone_mode=False)
        code = answer if isinstance(answer, int) else OK
    except typer.Abort:  # what typer makes of Ctrl-C
        code = INTERRUPTED
        print("tampu: interrupted", file=sys.stderr)
    except (Exception, KeyboardInterrupt) as error:
        wrong_argument: Callable[[], str] | None = getattr(error, "format_message", None)
        code = USAGE if wrong_argument else exit_code_of(error)
        print(f"tampu: {printable(wrong_argument() if wrong_argument else line_of(error))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
