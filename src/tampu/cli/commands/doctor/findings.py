"""The result of a check: ok, a note, or a problem with its fix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    #: Worth knowing; no action needed.
    NOTE = "note"
    #: Jobs are, or will be, lost, stuck or late: `doctor` exits with 3.
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    level: Level
    text: str
    remedy: str = ""
    #: The server or queue that was checked.
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding for JSON output."""
        return {
            "check": self.check,
            "about": self.about,
            "level": self.level.value,
            "text": self.text,
            "remedy": self.remedy or None,
        }


def ok(check: str, text: str) -> Finding:
    """Return a finding for a check that passed."""
    return Finding(check, Level.OK, text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(check, Level.NOTE, text, remedy)


def wrong(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that needs action, with its fix."""
    return Finding(check, Level.WRONG, text, remedy)
