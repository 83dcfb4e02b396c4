"""How operations reach the server: the keys of a queue, the packed script calls, one request and its reply.

The scripts, and what they reply, are in `redis/lua/rsmq_*.lua`. A method of `ScriptCalls` is the signature of a script
and returns the packed call. Calls that are made for every message are one format string on a prefix that is packed
once per queue.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from tampu.errors import ConfigError
from tampu.redis.connection import pack_command
from tampu.redis.scripts import load_script
from tampu.rsmq.errors import InvalidValue, QueueNotFound
from tampu.rsmq.options import RsmqOptions, no_hash_tag
from tampu.rsmq.validate import MAX_DURATION_SECS, RESERVED_NAME, check_qname, looks_like_milliseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tampu.redis.connection import Part, Reply
    from tampu.redis.faults import ServerError
    from tampu.redis.scripts import Script
    from tampu.rsmq.options import Precision

logger = logging.getLogger("tampu.rsmq")

CREATE = load_script("rsmq_create")
DROP = load_script("rsmq_drop")
ATTRIBUTES = load_script("rsmq_attributes")
SEND = load_script("rsmq_send")
RECEIVE = load_script("rsmq_receive")
VISIBILITY = load_script("rsmq_visibility")
DELETE = load_script("rsmq_delete")
ALL_SCRIPTS = (CREATE, DROP, ATTRIBUTES, SEND, RECEIVE, VISIBILITY, DELETE)

#: How long to hide a received message: in units of the hash, the queue's `vt` (None), or forever ("pop" removes it).
Hiding = int | Literal["pop"] | None

#: Replies of `send` and `receive` besides nil, which means that there is no such queue.
TOO_LONG = 1
OUT_OF_RANGE = 2

#: How long a sender's marker outlives its last send, in ms: longer than any client repeats a send.
MARKER_TTL_MS = 60_000
#: Queues whose keys are cached; a program that uses more starts over.
MAX_CACHED_QUEUES = 10_000


class QueueKeys:
    """The keys and the channel of one queue."""

    __slots__ = ("channel", "hash", "name", "prefixes", "sent", "zset")

    def __init__(self, ns: str, name: str) -> None:
        self.name = name
        #: Sorted set: the ids, by the time from which each may be received.
        self.zset = f"{ns}:{name}".encode()
        #: Hash: attributes, counters and bodies.
        self.hash = f"{ns}:{name}:Q".encode()
        #: Sends are published here if `realtime` is set.
        self.channel = f"{ns}:rt:{name}".encode()
        #: Prefix of the key of a sender's marker. A queue's name has no colon, so it is never the key of a queue.
        self.sent = f"{ns}:{name}:sent:".encode()
        #: Prefixes of packed calls, by script.
        self.prefixes: dict[str, bytes] = {}


class Keyring:
    """The keys of the queues in a namespace. Looking up a name checks it."""

    def __init__(self, ns: str) -> None:
        self._ns = ns
        #: Set: the names of all queues.
        self.index = f"{ns}:{RESERVED_NAME}".encode()
        self._cached: dict[str, QueueKeys] = {}

    def __getitem__(self, qname: object) -> QueueKeys:
        # Only text is looked up: 1 and True are one key of a dict, but not one queue.
        if type(qname) is str and (cached := self._cached.get(qname)) is not None:
            return cached
        keys = QueueKeys(self._ns, check_qname(qname))
        if len(self._cached) >= MAX_CACHED_QUEUES:
            self._cached.clear()
        self._cached[keys.name] = keys
        return keys


class ScriptCalls:
    """Packs the script calls of a client, as its options say."""

    def __init__(self, options: RsmqOptions) -> None:
        self._precision: Precision = options.precision
        #: Score units in one unit of a duration.
        self._step = (1000 if options.unit == "s" else 1) * (1000 if options.precision == "us" else 1)
        self._realtime = options.realtime
        #: The scripts default to what JavaScript writes: then these arguments are omitted.
        self._is_plain = options.precision == "ms" and options.unit == "s"
        self._sends_plain = self._is_plain and options.size_unit == "bytes" and not options.realtime

    def create(self, keys: QueueKeys, index: bytes, vt: int, delay: int, maxsize: int) -> bytes:
        """Reply: 1 created, 0 exists."""
        return CREATE.packed_call([keys.hash, index], [vt, delay, maxsize, keys.name])

    def drop(self, keys: QueueKeys, index: bytes) -> bytes:
        """Reply: 1 deleted, 0 no such queue."""
        return DROP.packed_call([keys.hash, keys.zset, index], [keys.name])

    def attributes(self, keys: QueueKeys, changes: Sequence[tuple[str, int]] = ()) -> bytes:
        """Reply: nil, or the attributes after the changes."""
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
        """Reply: nil, TOO_LONG, OUT_OF_RANGE or [the queue's delay, id, ...].

        `parts` are the random parts of the ids; `largest` is None if the largest of `bodies` counts, in bytes.
        """
        if self._sends_plain and delay is None and largest is None and marker is None:
            prefix = keys.prefixes.get("send")
            if prefix is None:
                prefix = keys.prefixes["send"] = _prefix(SEND, (keys.hash, keys.zset), "")
            count = 6
        else:
            names = (keys.hash, keys.zset) if marker is None else (keys.hash, keys.zset, marker[0])
            prefix = _prefix(
                *(SEND, names, "with", self._precision, self._step),
                *("" if delay is None else delay, keys.channel if self._realtime else ""),
                max(map(len, bodies)) if largest is None else largest,
                *("" if marker is None else marker[1], MARKER_TTL_MS),
            )
            count = 11 + len(names)
        if len(bodies) == 1:
            return b"*%d\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                *(count + 2, prefix),
                *(len(parts[0]), parts[0], len(bodies[0]), bodies[0]),
            )
        messages = [
            b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(part), part, len(body), body)
            for part, body in zip(parts, bodies, strict=True)
        ]
        return b"*%d\r\n%b%b" % (count + 2 * len(bodies), prefix, b"".join(messages))

    def receive(self, keys: QueueKeys, vt: Hiding, most: int) -> bytes:
        """Reply: nil, OUT_OF_RANGE, [the queue's vt, wait] or [vt, id, body, receive count, first received, ...]."""
        if vt is None and most == 1 and self._is_plain:
            packed = keys.prefixes.get("receive")
            if packed is None:
                packed = keys.prefixes["receive"] = RECEIVE.packed_call([keys.hash, keys.zset], [])
            return packed
        how = "" if vt is None else vt
        return RECEIVE.packed_call([keys.hash, keys.zset], [self._precision, self._step, how, most])

    def visibility(self, keys: QueueKeys, message_id: str, vt: int) -> bytes:
        """Reply: nil, 1 done, 0 no such message."""
        return VISIBILITY.packed_call([keys.hash, keys.zset], [self._precision, self._step, vt, message_id])

    def delete(self, keys: QueueKeys, message_ids: Sequence[str]) -> bytes:
        """Reply: one character per id, 1 deleted, 0 no such message."""
        prefix = keys.prefixes.get("delete")
        if prefix is None:
            prefix = keys.prefixes["delete"] = _prefix(DELETE, (keys.hash, keys.zset))
        ids = [b"$%d\r\n%b\r\n" % (len(each), each.encode()) for each in message_ids]  # an id is ASCII
        return b"*%d\r\n%b%b" % (5 + len(ids), prefix, b"".join(ids))


def _prefix(script: Script, keys: Sequence[bytes], *arguments: Part) -> bytes:
    """Return the first arguments of a call, without the line before them that counts all arguments."""
    return pack_command(("EVALSHA", script.sha, len(keys), *keys, *arguments)).partition(b"\r\n")[2]


class Session(ABC):
    """Base of the operations. A client says how a request travels."""

    def __init__(self, options: RsmqOptions) -> None:
        self._options = options
        self._queues = Keyring(options.ns)
        self._calls = ScriptCalls(options)
        #: By queue and attribute, the last value that was checked for milliseconds.
        self._checked_units: dict[tuple[str, str], bytes] = {}

    @property
    def options(self) -> RsmqOptions:
        """The options this client was made with."""
        return self._options

    @abstractmethod
    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        """Send one packed command and return its reply. `resend=False`: not again if the connection breaks."""

    def _explain(self, error: ServerError) -> None:
        """Raise an error that says what to do, where there is one."""
        if error.kind == "CROSSSLOT":  # a Cluster, reached by the URL of one node
            raise ConfigError(no_hash_tag(self._options.ns)) from error

    def _check_reply(self, reply: Reply, queue: QueueKeys, item: str) -> None:
        """Raise the error that `send` or `receive` replied instead of a list."""
        if reply is None:
            raise QueueNotFound(queue.name)
        if reply == OUT_OF_RANGE:
            raise InvalidValue(
                *(item, 0, MAX_DURATION_SECS, None),
                f"the hash of queue {queue.name!r} itself holds a {item} out of range: milliseconds, as Rust writes "
                f"them? Then use RsmqOptions(duration_unit='ms'); else mend it with set_queue_attributes",
            )

    def _check_unit(self, queue: QueueKeys, item: str, stored: bytes) -> None:
        """Warn, once per queue, if its stored vt or delay looks like milliseconds."""
        if len(stored) < 4 or self._options.unit != "s":  # less than 1000 is a plausible number of seconds
            return
        if self._checked_units.get((queue.name, item)) == stored:
            return
        self._checked_units[queue.name, item] = stored
        if stored.isdigit() and looks_like_milliseconds(int(stored)):
            logger.warning(
                "RSMQ queue %s has %s = %s in its hash, taken for seconds. That looks like milliseconds: the unit of "
                "Rust's rsmq_async. If so, use RsmqOptions(duration_unit='ms'), or set_queue_attributes(%r, %s=...)",
                *(queue.name, item, stored.decode()),
                *(queue.name, item),
            )
