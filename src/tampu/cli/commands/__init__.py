"""The commands, one module or folder each, and the table that lists them.

`tampu --help` and shell completion read only this table, so they start fast: a command's module is imported when the
command runs. Worker processes pass through here too, so this module must import nothing beyond the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or a group of subcommands."""

    name: str
    #: `module:attribute` below this package: a function, or the `typer.Typer` of a group.
    target: str
    #: Its panel in `tampu --help`.
    panel: str
    #: Its line in `tampu --help`. A test compares it with the first paragraph of the command's docstring.
    help: str


_TABLE = {
    "Run": {
        "demo": (
            "demo.command:demo",
            "Watch a small shop's day: orders, flaky payments, retries, delayed jobs, dead letters, a replay.",
        ),
        "new": (
            "new.command:new",
            "Write a small working project: tasks, a worker, tests, systemd unit, Dockerfile, Compose file.",
        ),
        "worker": ("worker.command:worker", "Run the jobs of queues, in one or several supervised processes."),
        "promoter": ("maintain:promoter", "Move delayed jobs into their queues when their time has come."),
        "scheduler": ("maintain:scheduler", "Fire repeatable jobs when they are due."),
    },
    "Look": {
        "inspect": (
            "inspect:inspect",
            "Show what waits, runs, is delayed or dead: of all queues, or of one with its workers.",
        ),
        "watch": ("watch:watch", "Watch one queue live: depths, rates, workers, events. Ctrl-C ends it."),
        "top": ("watch:top", "Watch all queues live, the busiest first. Ctrl-C ends it."),
        "events": (
            "events:events",
            "Show events of one queue or of all, oldest first; --json writes one JSON object a line.",
        ),
        "doctor": (
            "doctor.command:doctor",
            "Check the server and the queues, each fault with its remedy; exits with 3 when something is wrong.",
        ),
        "bench": ("bench:bench", "Measure this server with tampu, in a queue of its own that is removed afterwards."),
        "job": ("job:app", "One job: where it is, and how it came there."),
    },
    "Change": {
        "add": ("add:add", "Add a job; prints its id."),
        "cancel": ("cancel:cancel", "Cancel delayed jobs: those that wait for their time or their retry."),
        "queue": ("queue:app", "A queue as a whole: pause it, resume it, empty it."),
        "dlq": ("dlq:app", "Dead letters: look at them, put them back, throw them away."),
        "repeatable": ("repeatable:app", "Jobs that recur: list them, remove them, fire one now."),
    },
    "Others": {
        "pipeline": (
            "pipeline:app",
            "Build a lake of Parquet tables from queues' events with Spark, and a report from it.",
        ),
        "rsmq": ("rsmq:app", "Queues of RSMQ, the simple message queue that JavaScript and Rust share."),
    },
}

COMMANDS = {
    name: Command(name, target, panel, text)
    for panel, commands in _TABLE.items()
    for name, (target, text) in commands.items()
}
