"""The one-letter codes that Python and the Lua scripts exchange. The heads of the scripts say what each one carries."""

from __future__ import annotations

from enum import Enum, StrEnum


class AddKind(bytes, Enum):
    """What a window asks of the add script for a run of jobs."""

    NOW = b"n"
    NOW_WITH_ID = b"i"
    DELAYED = b"d"
    DELAYED_WITH_ID = b"e"


class AddCode(StrEnum):
    """What the add script answers for one job."""

    ADDED = "a"
    DUPLICATE = "d"
    #: The queue is full: not added.
    FULL = "f"
    #: The server refused it; the window's failure says why.
    ERROR = "e"
    #: Set by the client, not by the script: added, or perhaps added; the window's error says more.
    UNKNOWN = "u"


class OutcomeKind(bytes, Enum):
    """How a run of a job ended, as the settle script knows it."""

    SUCCESS = b"s"
    #: Success with a result to store.
    RESULT = b"r"
    RETRY = b"t"
    DEAD_LETTER = b"x"
    CANCELLED = b"c"


class SettleCode(StrEnum):
    """What the settle script answers for one outcome."""

    #: Written and acknowledged.
    WRITTEN = "k"
    #: The entry belongs to another consumer by now: nothing was written.
    LOST = "l"
    #: It could not be written: the outcome is kept here and sent again later.
    HELD = "h"
