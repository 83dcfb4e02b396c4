"""Each Lua script as a function: its signature is the contract, its result the packed call.

The scripts themselves, with what they answer, are in `redis/lua/rsmq_*.lua`. The calls that are made for every message
are one format on a beginning that is packed once for each queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tampu.redis.connection import pack_command
from tampu.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Part
    from tampu.redis.scripts import Script
    from tampu.rsmq.keys import QueueKeys
    from tampu.rsmq.options import Precision, RsmqOptions
    from tampu.rsmq.taking import Hiding

CREATE = load_script("rsmq_create")
DROP = load_script("rsmq_drop")
ATTRIBUTES = load_script("rsmq_attributes")
SEND = load_script("rsmq_send")
RECEIVE = load_script("rsmq_receive")
VISIBILITY = load_script("rsmq_visibility")
DELETE = load_script("rsmq_delete")
ALL = (CREATE, DROP, ATTRIBUTES, SEND, RECEIVE, VISIBILITY, DELETE)

#: Answers of `send` and `receive` besides nil, which means that there is no such queue.
TOO_LONG = 1
OUT_OF_RANGE = 2

#: How long a sender's marker outlives its last send, in ms: longer than anybody repeats a send.
MARKER_TTL_MS = 60_000


class ScriptCalls:
    """Packs the calls for queues written in one way."""

    def __init__(self, options: RsmqOptions) -> None:
        self._precision: Precision = options.precision
        #: Score units in one unit of a duration.
        self._step = (1000 if options.unit == "s" else 1) * (1000 if options.precision == "us" else 1)
        self._realtime = options.realtime
        #: Whether queues are written as JavaScript does: then the scripts need not be told.
        self._is_plain = options.precision == "ms" and options.unit == "s"
        self._sends_plain = self._is_plain and options.size_unit == "bytes" and not options.realtime

    def create(self, keys: QueueKeys, index: bytes, vt: int, delay: int, maxsize: int) -> bytes:
        """1 created, 0 exists."""
        return CREATE.packed_call([keys.hash, index], [vt, delay, maxsize, keys.name])

    def drop(self, keys: QueueKeys, index: bytes) -> bytes:
        """1 deleted, 0 no such queue."""
        return DROP.packed_call([keys.hash, keys.zset, index], [keys.name])

    def attributes(self, keys: QueueKeys, changes: Sequence[tuple[str, int]] = ()) -> bytes:
        """nil, or the attributes after the changes."""
        fields = [part for change in changes for part in change]
        return ATTRIBUTES.packed_call([keys.hash, keys.zset], [self._precision, *fields])

    def send(
        self,
        keys: QueueKeys,
        delay: int | None,
        largest: int | None,
        parts: Sequence[bytes],
        bodies: Sequence[bytes],
        marker: tuple[bytes, int] | None = None,
    ) -> bytes:
        """nil, TOO_LONG, OUT_OF_RANGE or [own delay, id, ...].

        `parts` are the random parts of the ids; `largest` is None if the largest of `bodies` counts, in bytes.
        """
        if self._sends_plain and delay is None and largest is None and marker is None:
            start = keys.starts.get("send")
            if start is None:
                start = keys.starts["send"] = _start(SEND, (keys.hash, keys.zset), "")
            count = 6
        else:
            names = (keys.hash, keys.zset) if marker is None else (keys.hash, keys.zset, marker[0])
            start = _start(
                *(SEND, names, "with", self._precision, self._step),
                *("" if delay is None else delay, keys.channel if self._realtime else ""),
                max(map(len, bodies)) if largest is None else largest,
                *("" if marker is None else marker[1], MARKER_TTL_MS),
            )
            count = 11 + len(names)
        if len(bodies) == 1:
            return b"*%d\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                *(count + 2, start),
                *(len(parts[0]), parts[0], len(bodies[0]), bodies[0]),
            )
        messages = [
            b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(part), part, len(body), body)
            for part, body in zip(parts, bodies, strict=True)
        ]
        return b"*%d\r\n%b%b" % (count + 2 * len(bodies), start, b"".join(messages))

    def receive(self, keys: QueueKeys, vt: Hiding, most: int) -> bytes:
        """nil, OUT_OF_RANGE, [own vt, wait] or [own vt, id, body, count, first received, ...]."""
        if vt is None and most == 1 and self._is_plain:
            packed = keys.starts.get("receive")
            if packed is None:
                packed = keys.starts["receive"] = RECEIVE.packed_call([keys.hash, keys.zset], [])
            return packed
        how = "" if vt is None else vt
        return RECEIVE.packed_call([keys.hash, keys.zset], [self._precision, self._step, how, most])

    def visibility(self, keys: QueueKeys, message_id: str, vt: int) -> bytes:
        """nil, 1 done, 0 no such message."""
        return VISIBILITY.packed_call([keys.hash, keys.zset], [self._precision, self._step, vt, message_id])

    def delete(self, keys: QueueKeys, message_ids: Sequence[str]) -> bytes:
        """One character for each id: 1 deleted, 0 there was none."""
        start = keys.starts.get("delete")
        if start is None:
            start = keys.starts["delete"] = _start(DELETE, (keys.hash, keys.zset))
        ids = [b"$%d\r\n%b\r\n" % (len(each), each.encode()) for each in message_ids]  # an id is ASCII
        return b"*%d\r\n%b%b" % (5 + len(ids), start, b"".join(ids))


def _start(script: Script, keys: Sequence[bytes], *arguments: Part) -> bytes:
    """The beginning of a call, without its first line, which says how many arguments there are."""
    return pack_command(("EVALSHA", script.sha, len(keys), *keys, *arguments)).partition(b"\r\n")[2]
