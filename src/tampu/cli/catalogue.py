"""Every command by name: where it is, the panel of the help it stands in, and its line there.

A command's module is loaded when the command is run. The help of `tampu` and the shell's Tab need only what is said
here, and so wait for no Redis client.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group


@dataclass(frozen=True, slots=True)
class Entry:
    """A command, or a group of them."""

    name: str
    #: `module:name` below `tampu.cli`, of a function or of a `typer.Typer`.
    home: str
    panel: str
    #: The first paragraph of its own help; a test holds the two together.
    help: str

    def load(self) -> Any:
        """The command itself."""
        module, _, name = self.home.partition(":")
        found = getattr(import_module(f"tampu.cli.{module}"), name)
        holder = typer.Typer(add_completion=False)
        holder.callback()(_nothing)  # without it a holder of one command would be that command, and have no name
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name)
        else:
            holder.command(self.name)(found)
        return get_group(holder).commands[self.name]


def _nothing() -> None:
    pass


_RUN, _LOOK, _CHANGE, _OTHERS = "Run", "Look", "Change", "Others"

CATALOGUE = (
    Entry(
        "demo",
        "demo.command:demo",
        _RUN,
        "Watch a small shop's day: orders, flaky payments, retries, delayed jobs, dead letters, a replay.",
    ),
    Entry("worker", "worker.command:worker", _RUN, "Run the jobs of queues, in one or several supervised processes."),
    Entry("promoter", "worker.parts:promoter", _RUN, "Move delayed jobs into their queues when their time has come."),
    Entry("scheduler", "worker.parts:scheduler", _RUN, "Fire repeatable jobs when they are due."),
    Entry(
        "inspect",
        "inspect:inspect",
        _LOOK,
        "Show what waits, runs, is delayed or dead: of all queues, or of one with its workers.",
    ),
    Entry("watch", "watch:watch", _LOOK, "Watch one queue live: depths, rates, workers, events. Ctrl-C ends it."),
    Entry("top", "watch:top", _LOOK, "Watch all queues live, the busiest first. Ctrl-C ends it."),
    Entry(
        "events",
        "events:events",
        _LOOK,
        "Show events of one queue or of all, oldest first; --json writes one JSON object a line.",
    ),
    Entry(
        "doctor",
        "doctor.command:doctor",
        _LOOK,
        "Check the server and the queues, each fault with its remedy; exits with 3 when something is wrong.",
    ),
    Entry(
        "bench",
        "bench:bench",
        _LOOK,
        "Measure this server with tampu, in a queue of its own that is removed afterwards.",
    ),
    Entry("job", "job:app", _LOOK, "One job: where it is, and how it came there."),
    Entry("add", "add:add", _CHANGE, "Add a job; prints its id."),
    Entry("cancel", "add:cancel", _CHANGE, "Cancel delayed jobs: those that wait for their time or their retry."),
    Entry("queue", "queue:app", _CHANGE, "A queue as a whole: pause it, resume it, empty it."),
    Entry("dlq", "dlq:app", _CHANGE, "Dead letters: look at them, put them back, throw them away."),
    Entry("repeatable", "repeatable:app", _CHANGE, "Jobs that recur: list them, remove them, fire one now."),
    Entry(
        "pipeline",
        "pipeline:app",
        _OTHERS,
        "Build a lake of Parquet tables from queues' events with Spark, and a report from it.",
    ),
    Entry("rsmq", "rsmq:app", _OTHERS, "Queues of RSMQ, the simple message queue that JavaScript and Rust share."),
)


def list_in(app: typer.Typer) -> None:
    """Name every command in the root's help; the root must be a `LoadingGroup`."""
    for entry in CATALOGUE:
        app.command(entry.name, help=entry.help, rich_help_panel=entry.panel)(_nothing)


class LoadingGroup(TyperGroup):
    """Has the commands' names and lines; loads the one that is called for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return next(((name, entry.load(), rest) for entry in CATALOGUE if entry.name == name), (name, None, rest))
