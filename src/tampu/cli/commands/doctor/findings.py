"""What a check found: fine, worth knowing, or wrong; what is wrong has a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    #: Worth knowing; no reason to act.
    NOTE = "note"
    #: Jobs are lost, stuck or late, or will be: `doctor` exits with 3.
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    text: str
    remedy: str = ""
    #: The server or the queue it is about.
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "check": self.check,
            "about": self.about,
            "level": self.level.value,
            "text": self.text,
            "remedy": self.remedy or None,
        }


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(check, Level.NOTE, text, remedy)


def wrong(check: str, text: str, remedy: str) -> Finding:
    """Something to act on."""
    return Finding(check, Level.WRONG, text, remedy)
