"""Shared base of all operations: the keys of a queue, the packed script calls, and error replies.

The scripts and their replies are documented in `redis/lua/rsmq_*.lua`. Each method of `ScriptCalls` has the signature
of a script and returns the packed call. Calls made for every message are one format string and a prefix that is packed
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
from tampu.rsmq.options import (
    MAX_DURATION_SECS,
    RESERVED_NAME,
    RsmqOptions,
    check_qname,
    looks_like_milliseconds,
    no_hash_tag,
)

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

#: How long to hide a received message: in units of the hash, None for the queue's `vt`, or "pop" to remove it.
Hiding = int | Literal["pop"] | None

#: Error replies of `send` and `receive`; a nil reply means that the queue does not exist.
TOO_LONG = 1
OUT_OF_RANGE = 2

#: TTL of a sender's marker after its last send, in ms: longer than any client repeats a send.
MARKER_TTL_MS = 60_000
#: Maximum queues whose keys are cached; then the cache is cleared.
MAX_CACHED_QUEUES = 10_000


class QueueKeys:
    """The keys and the channel of one queue."""

    __slots__ = ("channel", "hash", "name", "prefixes", "sent", "zset")

    def __init__(self, ns: str, name: str) -> None:
        self.name = name
        #: Sorted set: the IDs, by the time at which each becomes due.
        self.zset = f"{ns}:{name}".encode()
        #: Hash: attributes, counters and bodies.
        self.hash = f"{ns}:{name}:Q".encode()
        #: Sends are published here if `realtime` is set.
        self.channel = f"{ns}:rt:{name}".encode()
        #: Prefix of the keys of senders' markers. Queue names have no colon, so it never collides with a queue.
        self.sent = f"{ns}:{name}:sent:".encode()
        #: Prefixes of packed calls, by script.
        self.prefixes: dict[str, bytes] = {}


class Keyring:
    """The keys of the queues in a namespace. Looking up a name also validates it."""

    def __init__(self, ns: str) -> None:
        self._ns = ns
        #: Set: the names of all queues.
        self.index = f"{ns}:{RESERVED_NAME}".encode()
        self._cached: dict[str, QueueKeys] = {}

    def __getitem__(self, qname: object) -> QueueKeys:
        # Only str is looked up in the cache: 1 and True are the same dict key, but not the same queue name.
        if type(qname) is str and (cached := self._cached.get(qname)) is not None:
            return cached
        keys = QueueKeys(self._ns, check_qname(qname))
        if len(self._cached) >= MAX_CACHED_QUEUES:
            self._cached.clear()
        self._cached[keys.name] = keys
        return keys


class ScriptCalls:
    """Packs the script calls of a client, according to its options."""

    def __init__(self, options: RsmqOptions) -> None:
        self._precision: Precision = options.precision
        #: Score units in one unit of a duration.
        self._step = (1000 if options.unit == "s" else 1) * (1000 if options.precision == "us" else 1)
        self._realtime = options.realtime
        #: True if the scripts' defaults, those of JavaScript, apply: then these arguments are omitted.
        self._is_plain = options.precision == "ms" and options.unit == "s"
        self._sends_plain = self._is_plain and options.size_unit == "bytes" and not options.realtime

    def create(self, keys: QueueKeys, index: bytes, vt: int, delay: int, maxsize: int) -> bytes:
        """Pack a call of `rsmq_create`. Reply: 1 created, 0 exists."""
        return CREATE.packed_call([keys.hash, index], [vt, delay, maxsize, keys.name])

    def drop(self, keys: QueueKeys, index: bytes) -> bytes:
        """Pack a call of `rsmq_drop`. Reply: 1 deleted, 0 no such queue."""
        return DROP.packed_call([keys.hash, keys.zset, index], [keys.name])

    def attributes(self, keys: QueueKeys, changes: Sequence[tuple[str, int]] = ()) -> bytes:
        """Pack a call of `rsmq_attributes`. Reply: nil, or the attributes after the changes."""
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
        """Pack a call of `rsmq_send`. Reply: nil, TOO_LONG, OUT_OF_RANGE or [the queue's delay, ID, ...].

        `parts` are the random parts of the IDs. `largest` is the size of the largest message, None = bytes of `bodies`.
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
        """Pack a call of `rsmq_receive`.

        Reply: nil, OUT_OF_RANGE, [the queue's vt, wait] or [vt, ID, body, receive count, first received, ...].
        """
        if vt is None and most == 1 and self._is_plain:
            packed = keys.prefixes.get("receive")
            if packed is None:
                packed = keys.prefixes["receive"] = RECEIVE.packed_call([keys.hash, keys.zset], [])
            return packed
        how = "" if vt is None else vt
        return RECEIVE.packed_call([keys.hash, keys.zset], [self._precision, self._step, how, most])

    def visibility(self, keys: QueueKeys, message_id: str, vt: int) -> bytes:
        """Pack a call of `rsmq_visibility`. Reply: nil, 1 done, 0 no such message."""
        return VISIBILITY.packed_call([keys.hash, keys.zset], [self._precision, self._step, vt, message_id])

    def delete(self, keys: QueueKeys, message_ids: Sequence[str]) -> bytes:
        """Pack a call of `rsmq_delete`. Reply: one character per ID, 1 deleted, 0 no such message."""
        prefix = keys.prefixes.get("delete")
        if prefix is None:
            prefix = keys.prefixes["delete"] = _prefix(DELETE, (keys.hash, keys.zset))
        ids = [b"$%d\r\n%b\r\n" % (len(each), each.encode()) for each in message_ids]  # an id is ASCII
        return b"*%d\r\n%b%b" % (5 + len(ids), prefix, b"".join(ids))


def _prefix(script: Script, keys: Sequence[bytes], *arguments: Part) -> bytes:
    """Return the packed first arguments of a call, without the header that counts all arguments."""
    return pack_command(("EVALSHA", script.sha, len(keys), *keys, *arguments)).partition(b"\r\n")[2]


class Session(ABC):
    """Base of the operations. Clients implement `_ask`, which sends a request."""

    def __init__(self, options: RsmqOptions) -> None:
        self._options = options
        self._queues = Keyring(options.ns)
        self._calls = ScriptCalls(options)
        #: The last value that was checked for milliseconds, by queue and attribute.
        self._checked_units: dict[tuple[str, str], bytes] = {}

    @property
    def options(self) -> RsmqOptions:
        """The options of this client."""
        return self._options

    @abstractmethod
    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        """Send one packed command and return its reply. With `resend=False`, never send it twice."""

    def _explain(self, error: ServerError) -> None:
        """Raise a more helpful error, if there is one."""
        if error.kind == "CROSSSLOT":  # a Cluster, but the URL is that of a single server
            raise ConfigError(no_hash_tag(self._options.ns)) from error

    def _check_reply(self, reply: Reply, queue: QueueKeys, item: str) -> None:
        """Raise the error that `send` or `receive` replied instead of a list."""
        if reply is None:
            raise QueueNotFound(queue.name)
        if reply == OUT_OF_RANGE:
            raise InvalidValue(
                *(item, 0, MAX_DURATION_SECS, None),
                f"the stored {item} of queue {queue.name!r} is out of range. If it is in milliseconds, as written by "
                f"Rust, use RsmqOptions(duration_unit='ms'); otherwise correct it with set_queue_attributes",
            )

    def _check_unit(self, queue: QueueKeys, item: str, stored: bytes) -> None:
        """Log a warning, once per queue, if its stored vt or delay looks like milliseconds."""
        if len(stored) < 4 or self._options.unit != "s":  # less than 1000 is a plausible number of seconds
            return
        if self._checked_units.get((queue.name, item)) == stored:
            return
        self._checked_units[queue.name, item] = stored
        if stored.isdigit() and looks_like_milliseconds(int(stored)):
            logger.warning(
                "RSMQ queue %s has %s = %s, which is read as seconds but looks like milliseconds, the unit of Rust's "
                "rsmq_async; if so, use RsmqOptions(duration_unit='ms') or set_queue_attributes(%r, %s=...)",
                *(queue.name, item, stored.decode()),
                *(queue.name, item),
            )
