"""Time zones for cron: convert between instants and what a zone's wall clock shows (readings).

Both are whole seconds: an instant counts from 1970-01-01T00:00:00Z, a reading from 1970-01-01 00:00:00 on the wall
clock. Pure, except for the zone data that `zoneinfo` reads.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias
from zoneinfo import ZoneInfo

from tampu.base.checks import invalid

if TYPE_CHECKING:
    from tampu.errors import ConfigError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET = re.compile(r"([+-])([0-9]{1,2}):([0-9]{2})|([+-])([0-9]{2})([0-9]{2})")

#: In the database, but not a place: the marker of a machine without a configured zone.
_NOT_A_PLACE = "Factory"


@dataclass(frozen=True, slots=True)
class Shift:
    """One change of a zone's offset from UTC, in seconds: clocks put forward (a gap) or back (a repeat)."""

    at: int  #: the first instant of the new offset
    before: int
    after: int

    @property
    def is_gap(self) -> bool:
        """True if the clock skips readings; otherwise it shows them twice, first with the old offset, then the new."""
        return self.after > self.before

    @property
    def first_reading(self) -> int:
        """The first reading that is skipped or shown twice."""
        return self.at + min(self.before, self.after)

    @property
    def end_reading(self) -> int:
        """The first reading after the gap or the repeat."""
        return self.at + max(self.before, self.after)


@dataclass(frozen=True, slots=True)
class FixedZone:
    """A constant offset from UTC."""

    name: str
    offset: int

    def reading(self, instant: int) -> int:
        """Return what the wall clock shows at `instant`."""
        return instant + self.offset

    def place(self, reading: int) -> int | Shift:
        """Return the instant of `reading`; never a `Shift` here."""
        return reading - self.offset


@dataclass(frozen=True, slots=True)
class IanaZone:
    """A zone of the IANA database, with daylight saving time.

    Assumes that a zone's offset does not change twice within a day, which holds for every zone since 1970.
    """

    name: str
    info: ZoneInfo

    def reading(self, instant: int) -> int:
        """Return what the wall clock shows at `instant`."""
        # Not fromtimestamp: it fails after the year 3000 on some systems.
        shown = (_EPOCH + timedelta(seconds=instant)).astimezone(self.info)
        return int(shown.replace(tzinfo=UTC).timestamp())

    def place(self, reading: int) -> int | Shift:
        """Return the instant of `reading`, or the shift because of which there is none, or there are two."""
        shown = datetime(1970, 1, 1, tzinfo=self.info) + timedelta(seconds=reading)
        by_old_offset = int(shown.timestamp())
        by_new_offset = int(shown.replace(fold=1).timestamp())
        if by_old_offset == by_new_offset:
            return by_old_offset
        before, after = reading - by_old_offset, reading - by_new_offset
        low, high = sorted((by_old_offset, by_new_offset))
        return Shift(self._change_between(low, high, before), before, after)

    def _change_between(self, low: int, high: int, before: int) -> int:
        """Return the first instant after `low` whose offset is not `before`, by bisection: `zoneinfo` has no lookup."""
        while high - low > 1:
            middle = (low + high) // 2
            if self.reading(middle) - middle == before:
                low = middle
            else:
                high = middle
        return high


Zone: TypeAlias = FixedZone | IanaZone

UTC_ZONE = FixedZone("UTC", 0)


def parse_zone(tz: str | None) -> Zone:
    """Return the zone that `tz` names. Raises `ConfigError`, with a suggestion if a known name is similar.

    | given                                 | zone                                                             |
    |---------------------------------------|------------------------------------------------------------------|
    | None, blank, `UTC` in any case, `Z`   | UTC                                                              |
    | `+05:30`, `-0800`, `+5:30`            | that offset, less than 24 hours, minutes below 60                |
    | `America/New_York`                    | the IANA zone; the name is case-sensitive, as in ChasquiMQ       |
    """
    if tz is None:
        return UTC_ZONE
    if not isinstance(tz, str):
        raise invalid("tz", tz, "a str or None")
    return _zone_named(tz.strip())


@lru_cache(maxsize=1024)
def _zone_named(name: str) -> Zone:
    if not name or name == "Z" or name.upper() == "UTC":
        return UTC_ZONE
    if name[0] in "+-":
        return FixedZone(name, _offset(name))
    if name not in _iana_names():
        raise _no_such_zone(name)
    return IanaZone(name, ZoneInfo(name))


def _offset(text: str) -> int:
    match = _OFFSET.fullmatch(text)
    if match is None:
        raise invalid("tz", text, "an offset such as +HH:MM, +HHMM or +H:MM (or with -)")
    sign, hours, minutes = (part for part in match.groups() if part is not None)
    if int(hours) > 23 or int(minutes) > 59:
        raise invalid("tz", text, "an offset from -23:59 to +23:59 with minutes from 00 to 59")
    seconds = int(hours) * 3600 + int(minutes) * 60
    return -seconds if sign == "-" else seconds


@cache
def _iana_names() -> frozenset[str]:
    """Return all names that `tzdata` lists. Finding a file is not enough: a file system may accept `europe/paris`."""
    return frozenset(files("tzdata").joinpath("zones").read_text().split()) - {_NOT_A_PLACE}


def _no_such_zone(name: str) -> ConfigError:
    allowed = "UTC, an offset such as +05:30, or an IANA name in its exact spelling"
    meant = _nearest_name(name)
    hint = f" (did you mean {meant!r}?)" if meant else ", such as America/New_York"
    return invalid("tz", name, allowed + hint)


def _nearest_name(name: str) -> str | None:
    spelling = {known.casefold(): known for known in sorted(_iana_names())}
    close = difflib.get_close_matches(name.replace(" ", "_").casefold(), spelling, n=1, cutoff=0.8)
    return spelling[close[0]] if close else None
