"""Before something is destroyed: how many it would touch, then the question, unless `--yes` has answered it."""

from __future__ import annotations

import sys

import typer

from tampu.cli.exits import UsageError
from tampu.cli.output import printable, say


def may_go_on(question: str, count: int, *, yes: bool, dry_run: bool) -> bool:
    """Say what would happen (`question` reads like "remove 12 dead letters of emails"), and whether it may."""
    if dry_run:
        say(f"would {question}")
        return False
    if count == 0:
        say(f"nothing to do: would {question}")
        return False
    if yes:
        say(f"{question} ...")
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"would {question}: say --yes, as nobody can be asked here, or --dry-run")
    if not typer.confirm(f"{printable(question)}?", err=True):
        say("nothing was done")
        return False
    return True
