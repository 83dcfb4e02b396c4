"""`tampu rsmq bridge SRC_QUEUE DEST_QUEUE`: from RSMQ into tampu, while old producers go on as before."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tampu.cli.options import DEFAULT_TIMEOUT_SECS, AsJson, Timeout, Url
from tampu.cli.rsmq_session import DEFAULT_NS, Ns, Place, Unit, tell
from tampu.engine.config import DEFAULT_DEDUP_TTL_SECS, ProducerConfig
from tampu.engine.options import AddOptions
from tampu.engine.producer import Producer
from tampu.redis.settings import resolve_url
from tampu.rsmq.bridge import DEFAULT_BATCH, DEFAULT_VT_SECS, Bridge

if TYPE_CHECKING:
    from tampu.rsmq import Rsmq

Decode = Literal["text", "json", "bytes"]


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


def bridge(
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
    ] = DEFAULT_VT_SECS,
    dedup_ttl: Annotated[
        int, typer.Option("--dedup-ttl", min=1, metavar="SECONDS", help="Remember the ids moved for so long.")
    ] = DEFAULT_DEDUP_TTL_SECS,
    dest_url: Annotated[
        str | None,
        typer.Option("--dest-url", metavar="URL", help="The server of DEST_QUEUE, if another.", show_default=False),
    ] = None,
    url: Url = None,
    ns: Ns = DEFAULT_NS,
    unit: Unit = "s",
    timeout: Timeout = DEFAULT_TIMEOUT_SECS,
    as_json: AsJson = False,
) -> None:
    """Move the messages of an RSMQ queue into a tampu queue, until Ctrl-C.

    At least once: a message is deleted when it has been added. Its id becomes the job's, so that a message which is
    moved a second time, after a crash in between, is not added a second time.
    """
    config = ProducerConfig(queue_name=destination, overflow="wait", dedup_ttl_secs=dedup_ttl)

    async def move(rsmq: Rsmq) -> None:
        await rsmq.get_queue_attributes(source)  # a queue that is not there is told before anything is begun
        producer: Producer[Any]
        async with Producer.connect(dest_url or resolve_url(url), config) as producer:
            moving = Bridge(rsmq, source, TampuInlet(producer, name, decode), batch=batch, vt_secs=vt)
            try:
                await (moving.drain() if drain else moving.run())
            finally:
                tell({"moved": moving.moved}, f"moved {moving.moved} message(s) to {destination}", as_json)

    Place(url, timeout, ns, unit).work(source, move)
