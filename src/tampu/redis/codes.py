"""The one-letter codes that Python and the Lua scripts exchange. The headers of the scripts document each one."""

from __future__ import annotations

from enum import Enum, StrEnum


class AddKind(bytes, Enum):
    """Kinds of runs of jobs in a window of the add script."""

    NOW = b"n"
    NOW_WITH_ID = b"i"
    DELAYED = b"d"
    DELAYED_WITH_ID = b"e"


class AddCode(StrEnum):
    """The add script's result for one job."""

    ADDED = "a"
    DUPLICATE = "d"
    #: Not added: the queue is full.
    FULL = "f"
    #: The server rejected it; the error of the window says why.
    ERROR = "e"
    #: Set by the client, not by the script: it is not known whether the job was added; see the error of the window.
    UNKNOWN = "u"


class OutcomeKind(bytes, Enum):
    """The outcome of an attempt, as the settle script knows it."""

    SUCCESS = b"s"
    #: Success with a result to store.
    RESULT = b"r"
    RETRY = b"t"
    DEAD_LETTER = b"x"
    CANCELLED = b"c"


class SettleCode(StrEnum):
    """The settle script's result for one outcome."""

    #: Written and acknowledged.
    WRITTEN = "k"
    #: Not written: the entry now belongs to another consumer.
    LOST = "l"
    #: Could not be written; the worker keeps the outcome and sends it again later.
    HELD = "h"
