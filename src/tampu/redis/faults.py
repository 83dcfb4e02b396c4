"""Errors of a server and what to do about them: one table for all parts of tampu.

A `Remedy` is what must happen before the same request may be sent again; `NONE` means it must not be resent.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from tampu.errors import RedisError


class Remedy(Enum):
    """Action to take before a request is sent again."""

    #: Do not send it again: the request is refused until it, or the server's configuration, changes.
    NONE = auto()
    #: Wait a little and send it to the same server.
    WAIT = auto()
    #: Reconnect, with fresh credentials.
    RECONNECT = auto()
    #: Find the server of these keys again and connect to it.
    REDISCOVER = auto()
    #: Load the scripts again.
    LOAD_SCRIPTS = auto()
    #: Create the consumer group again.
    MAKE_GROUP = auto()


#: Errors of a server, by their first word. Errors that are not listed are `NONE`: the request itself is wrong.
REMEDIES: dict[str, Remedy] = {
    "LOADING": Remedy.WAIT,  # the server is reading its data from disk
    "BUSY": Remedy.WAIT,  # another script has been running for too long
    "TRYAGAIN": Remedy.WAIT,  # the slot is migrating and the keys are on two nodes
    "ASK": Remedy.WAIT,  # the slot is migrating and the key is already on the other node
    "UNBLOCKED": Remedy.WAIT,  # CLIENT UNBLOCK or a failover ended a blocked read
    "CLUSTERDOWN": Remedy.REDISCOVER,
    "MASTERDOWN": Remedy.REDISCOVER,
    "READONLY": Remedy.REDISCOVER,  # this server is now a replica: the master is elsewhere
    "MOVED": Remedy.REDISCOVER,
    "MAXCLIENTS": Remedy.RECONNECT,  # tampu's word for the error of a server that refuses further connections
    "NOAUTH": Remedy.RECONNECT,  # credentials expired, or were set after connecting
    "NOSCRIPT": Remedy.LOAD_SCRIPTS,
    "NOGROUP": Remedy.MAKE_GROUP,
    "OOM": Remedy.NONE,
    "MISCONF": Remedy.NONE,  # the server cannot save and refuses writes
    "NOREPLICAS": Remedy.NONE,
    "WRONGPASS": Remedy.NONE,
    "NOPERM": Remedy.NONE,
    "WRONGTYPE": Remedy.NONE,
}

#: Refusals that can pass without a change of the request: a worker retries, because it must not give up; a producer
#: raises the error.
PASSING = frozenset({"OOM", "MISCONF", "NOREPLICAS"})

_ADVICE: dict[str, str] = {
    "OOM": "the server has reached its maxmemory: raise it, or let workers drain the queue",
    "MISCONF": "the server cannot save its data and refuses writes: check its disk and its log",
    "NOREPLICAS": "the server has fewer replicas than min-replicas-to-write requires",
    "WRONGPASS": "wrong user name or password",
    "NOAUTH": "the server requires a password: add it to the URL, redis://user:password@host",
    "NOPERM": "the ACL user lacks a permission: it needs the queue's keys ({chasqui:*) and this command",
    "READONLY": "this is a replica: connect to the master, or through redis+sentinel:// or redis+cluster://",
    "MAXCLIENTS": "raise its maxclients, or close connections",
    "LOADING": "the server is still reading its data from disk",
    "TRYAGAIN": "the Cluster is moving this slot to another node: it can be used when the move ends",
    "CLUSTERDOWN": "the Cluster does not currently serve this slot",
    "MASTERDOWN": "the replica has lost its master",
}


#: How Redis before 7 reports an error of a command inside a script: the error itself comes last.
_IN_SCRIPT = re.compile(r"(?:ERR Error running script .*?)?(@user_script: ?\d+: )+-?(?P<error>[A-Z]+ .*)", re.DOTALL)


class ServerError(RedisError):
    """The server replied with an error. `kind` is its first word, such as OOM."""

    def __init__(self, text: str) -> None:
        if wrapped := _IN_SCRIPT.match(text):
            text = wrapped["error"].rstrip()
        self.kind = "MAXCLIENTS" if text.startswith("ERR max number of clients") else text.split(" ", 1)[0]
        advice = _ADVICE.get(self.kind)
        super().__init__(f"{text} ({advice})" if advice else text)

    @property
    def remedy(self) -> Remedy:
        """Return the action before the request is sent again."""
        return REMEDIES.get(self.kind, Remedy.NONE)


def refused_login(error: ServerError) -> ServerError:
    """Return the error of a refused login without the server's words, which may repeat the password."""
    if error.kind == "MAXCLIENTS":
        return error
    if error.kind in REMEDIES:
        return ServerError(f"{error.kind} the server refused the login")
    if "without any password configured" in str(error):
        return ServerError("ERR the server has no password for the default user: remove it from the URL")
    return ServerError("ERR the server refused the login (its answer is not shown: it may contain the password)")


class ConnectionLost(RedisError):  # noqa: N818 - what happened, not a kind of error
    """The connection broke, or no reply arrived in time; the server may or may not have executed the request."""

    remedy = Remedy.RECONNECT


class Unreachable(RedisError):  # noqa: N818
    """No connection could be made; nothing was sent."""

    remedy = Remedy.RECONNECT


def remedy_of(error: BaseException) -> Remedy:
    """Return the remedy for any error; `NONE` if it does not come from a server or a connection."""
    if isinstance(error, ServerError | ConnectionLost | Unreachable):
        return error.remedy
    return Remedy.NONE
