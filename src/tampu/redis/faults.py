"""What can go wrong with a server, and what each part does about it: one table for all of them.

A `Remedy` says what has to happen before the same request may be sent again; `NONE` means it may not.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from tampu.errors import RedisError


class Remedy(Enum):
    """What makes a resend sensible."""

    #: Nothing: the request is refused for good, or until somebody changes the server.
    NONE = auto()
    #: Time: the same request to the same server, a little later.
    WAIT = auto()
    #: A new connection, with fresh credentials.
    RECONNECT = auto()
    #: A new look at who serves these keys, then a new connection.
    REDISCOVER = auto()
    #: Loading the scripts again.
    LOAD_SCRIPTS = auto()
    #: Making the consumer group again.
    MAKE_GROUP = auto()


#: Errors a server answers with, by their first word. What is not listed is `NONE`: a request that is simply wrong.
REMEDIES: dict[str, Remedy] = {
    "LOADING": Remedy.WAIT,  # it reads its data from disk
    "BUSY": Remedy.WAIT,  # a script of somebody's runs too long
    "TRYAGAIN": Remedy.WAIT,  # the slot is on the move and its keys are on two nodes
    "ASK": Remedy.WAIT,  # the same, and the key is on the other node already
    "UNBLOCKED": Remedy.WAIT,  # a blocked read was ended by CLIENT UNBLOCK or by a failover
    "CLUSTERDOWN": Remedy.REDISCOVER,
    "MASTERDOWN": Remedy.REDISCOVER,
    "READONLY": Remedy.REDISCOVER,  # a replica: the master is elsewhere by now
    "MOVED": Remedy.REDISCOVER,
    "NOAUTH": Remedy.RECONNECT,  # credentials expired, or were set while we were connected
    "NOSCRIPT": Remedy.LOAD_SCRIPTS,
    "NOGROUP": Remedy.MAKE_GROUP,
    "OOM": Remedy.NONE,
    "MISCONF": Remedy.NONE,  # it cannot save and refuses writes
    "NOREPLICAS": Remedy.NONE,
    "WRONGPASS": Remedy.NONE,
    "NOPERM": Remedy.NONE,
    "WRONGTYPE": Remedy.NONE,
}

#: Refusals that pass by themselves: a worker, which must not give up, tries again; a producer tells its caller.
PASSING = frozenset({"OOM", "MISCONF", "NOREPLICAS"})

_ADVICE: dict[str, str] = {
    "OOM": "the server is at its maxmemory: raise it, or let workers drain the queue",
    "MISCONF": "the server cannot save its data and refuses writes: look at its disk and its log",
    "NOREPLICAS": "the server demands replicas (min-replicas-to-write) and has too few",
    "WRONGPASS": "user name or password is wrong",
    "NOAUTH": "the server demands a password: put it into the URL, redis://user:password@host",
    "NOPERM": "the ACL user lacks a permission: it needs the queue's keys ({chasqui:*) and the commands named",
    "READONLY": "this is a replica: connect to the master, or through redis+sentinel:// or redis+cluster://",
    "LOADING": "the server is still reading its data from disk",
    "CLUSTERDOWN": "the cluster does not serve this slot at the moment",
    "MASTERDOWN": "the replica has lost its master",
}


#: What Redis before 7 says when a command fails inside a script: the error itself comes last.
_IN_SCRIPT = re.compile(r"(?:ERR Error running script .*?)?(@user_script: ?\d+: )+-?(?P<error>[A-Z]+ .*)", re.DOTALL)


class ServerError(RedisError):
    """The server answered a request with an error. `kind` is its first word, such as OOM."""

    def __init__(self, text: str) -> None:
        if wrapped := _IN_SCRIPT.match(text):
            text = wrapped["error"].rstrip()
        self.kind = text.split(" ", 1)[0]
        advice = _ADVICE.get(self.kind)
        super().__init__(f"{text} ({advice})" if advice else text)

    @property
    def remedy(self) -> Remedy:
        """What makes a resend sensible."""
        return REMEDIES.get(self.kind, Remedy.NONE)


class ConnectionLost(RedisError):  # noqa: N818 - what happened, not a kind of error
    """The connection broke, or nothing came back in time; a request under way may or may not have been carried out."""

    remedy = Remedy.RECONNECT


class Unreachable(RedisError):  # noqa: N818
    """No connection could be made at all; nothing was sent."""

    remedy = Remedy.RECONNECT


def remedy_of(error: BaseException) -> Remedy:
    """The remedy for any error; `NONE` for those that are not about a server."""
    if isinstance(error, ServerError | ConnectionLost | Unreachable):
        return error.remedy
    return Remedy.NONE
