"""Shared base of all operations: the keys of a queue, the scripts, and error replies.

The scripts and their replies are documented in `redis/lua/rsmq_*.lua`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from tampu.errors import ConfigError
from tampu.redis.scripts import load_script
from tampu.rsmq.errors import InvalidValue, QueueNotFound
from tampu.rsmq.options import (
    MAX_DURATION_SECS,
    RESERVED_NAME,
    RsmqOptions,
    check_duration,
    check_qname,
    looks_like_milliseconds,
    no_hash_tag,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tampu.redis.connection import Reply
    from tampu.redis.faults import ServerError
    from tampu.rsmq.options import Duration

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

#: An error reply of `send` and `receive`; a nil reply means that the queue does not exist.
OUT_OF_RANGE = 2

#: TTL of a sender's marker after its last send, in ms: longer than any client repeats a send.
MARKER_TTL_MS = 60_000
#: Maximum queues whose keys are cached; then the cache is cleared.
MAX_CACHED_QUEUES = 10_000


class QueueKeys:
    """The keys and the channel of one queue."""

    __slots__ = ("both", "channel", "hash", "name", "sent", "zset")

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
        #: The keys of most scripts.
        self.both = self.hash, self.zset


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


class Session(ABC):
    """Base of the operations. Clients implement `_ask`, which sends a request."""

    def __init__(self, options: RsmqOptions) -> None:
        self._options = options
        self._queues = Keyring(options.ns)
        #: Score units in one unit of a duration.
        self._step = (1000 if options.unit == "s" else 1) * (1000 if options.precision == "us" else 1)
        #: True if the scripts' defaults, those of JavaScript, apply: then calls omit these arguments.
        self._is_plain = options.precision == "ms" and options.unit == "s"
        #: The last value that was checked for milliseconds, by queue and attribute.
        self._checked_units: dict[tuple[str, str], bytes] = {}

    @property
    def options(self) -> RsmqOptions:
        """The options of this client."""
        return self._options

    @abstractmethod
    async def _ask(self, packed: bytes, *, resend: bool = True) -> Reply:
        """Send one packed command and return its reply. With `resend=False`, never send it twice."""

    async def _shared(
        self,
        key: object,
        item: Any,
        call: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
        size_of: Callable[[Any], int] | None = None,
    ) -> Any:
        """Return the result of `call` for this item. `call` takes items and returns a result, or an error, for each.

        `Rsmq` overrides it: there concurrent callers with the same key share a call.
        """
        (result,) = await call((item,))
        if isinstance(result, Exception):
            raise result
        return result

    def _checked(self, item: str, duration: Duration) -> int:
        return check_duration(item, duration, self._options.unit)

    def _duration(self, item: str, duration: Duration | None) -> int | None:
        return None if duration is None else self._checked(item, duration)

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
