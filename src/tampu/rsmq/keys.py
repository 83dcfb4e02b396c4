"""The keys and the channel of a queue."""

from __future__ import annotations

from tampu.rsmq.validate import RESERVED_NAME, check_qname

#: Names whose keys are remembered; a program that uses more starts over.
_MOST_REMEMBERED = 10_000


class QueueKeys:
    """What one queue is called on the server."""

    __slots__ = ("channel", "hash", "name", "sent", "starts", "zset")

    def __init__(self, ns: str, name: str) -> None:
        self.name = name
        #: Sorted set: the ids, by the time from which each may be received.
        self.zset = f"{ns}:{name}".encode()
        #: Hash: attributes, counters and bodies.
        self.hash = f"{ns}:{name}:Q".encode()
        #: Where a send is told of in realtime.
        self.channel = f"{ns}:rt:{name}".encode()
        #: Start of the name of a sender's marker. No name has a colon, so it is no queue's key.
        self.sent = f"{ns}:{name}:sent:".encode()
        #: Beginnings of calls, by what they are about: see `scripts`.
        self.starts: dict[object, bytes] = {}


class Keyring:
    """The keys of the queues of a namespace, by their names, which are checked on the way."""

    def __init__(self, ns: str) -> None:
        self._ns = ns
        #: Set: the names of all queues.
        self.index = f"{ns}:{RESERVED_NAME}".encode()
        self._known: dict[object, QueueKeys] = {}

    def __getitem__(self, qname: object) -> QueueKeys:
        # Only text is remembered: 1 and True are one key of a dict, but not one queue.
        if type(qname) is str and (known := self._known.get(qname)) is not None:
            return known
        keys = QueueKeys(self._ns, check_qname(qname))
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[keys.name] = keys
        return keys
