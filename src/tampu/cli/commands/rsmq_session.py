"""Shared by the `rsmq` commands: their options, the client, and the output of messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from tampu.cli.errors import CliError, UsageError
from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, Timeout, Url
from tampu.cli.output import cell, say, show, write_json, write_line
from tampu.cli.session import run
from tampu.cli.tables import table
from tampu.redis.settings import resolve_url
from tampu.rsmq import (
    InvalidFormat,
    InvalidValue,
    MessageNotString,
    MissingParameter,
    NoAttributeSupplied,
    Rsmq,
    RsmqError,
    RsmqOptions,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tampu.rsmq import QueueAttributes, RsmqMessage

T = TypeVar("T")

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
