"""The commands, one module or folder each, and the table that lists them.

`tampu --help` and shell completion read only this table, so they start fast: a command's module is imported when the
command runs. Worker processes import this module too, so it must import nothing outside the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or a group of subcommands."""

    name: str
    #: `module:attribute` in this package: a function, or the `typer.Typer` of a group.
    target: str
    #: Panel of `tampu --help` that lists it.
    panel: str
    #: Help line in `tampu --help`. A test compares it with the first paragraph of the command's docstring.
    help: str


_TABLE = {
    "Run": {
        "demo": (
            "demo:demo",
            "Simulate a day in a small shop: orders, flaky payments, retries, delayed jobs, dead letters and a replay.",
        ),
        "new": (
            "new:new",
            "Write a small working project: tasks, a worker, tests, a systemd unit, a Dockerfile and a Compose file.",
        ),
        "worker": ("worker.command:worker", "Run jobs from one or more queues, in one or more supervised processes."),
        "promoter": ("maintain:promoter", "Move delayed jobs into their queues when they are due."),
        "scheduler": ("maintain:scheduler", "Enqueue the job of each schedule when it is due."),
    },
    "Inspect": {
        "inspect": (
            "inspect:inspect",
            "Show how many jobs are waiting, pending, delayed or dead in all queues, or in one queue with its workers.",
        ),
        "watch": ("inspect:watch", "Watch one queue live: depths, rates, workers and events. Press Ctrl-C to exit."),
        "top": ("inspect:top", "Watch all queues live, busiest first. Press Ctrl-C to exit."),
        "stats": (
            "stats:stats",
            "Show how often each task of a queue ran, failed and died, and how long runs and waits took.",
        ),
        "dashboard": (
            "dashboard:dashboard",
            "Serve a web interface of the queues: what waits, what failed and why, and actions that ask first.",
        ),
        "events": (
            "events:events",
            "Show events of one queue or all queues, oldest first. --json prints one JSON object per line.",
        ),
        "doctor": (
            "doctor:doctor",
            "Check the server and the queues, and say how to fix each problem. Exits with 3 if it finds any.",
        ),
        "bench": ("bench:bench", "Benchmark this server with tampu, in a temporary queue."),
        "job": ("job:app", "List jobs, or inspect one: its state and its history."),
        "workers": (
            "inspect:workers",
            "List the workers of all queues, or of one, with host, process, version and running jobs.",
        ),
    },
    "Manage": {
        "add": ("changes:add", "Add a job and print its ID."),
        "cancel": (
            "changes:cancel",
            "Cancel jobs by ID, or all that match --name, --older-than and --state, up to 10,000 per call.",
        ),
        "queue": ("queue:app", "List, pause, resume, drain, purge or delete queues."),
        "limit": ("limit:app", "Show, set or clear the limits of a queue, its tasks and its keys."),
        "dlq": ("dlq:app", "Summarize, show, repair, replay or remove dead letters."),
        "schedule": ("changes:app", "List, run or remove schedules."),
    },
    "Other": {
        "pipeline": (
            "pipeline:app",
            "Build a lake of Delta tables from queue events with Spark; query it and report on it.",
        ),
        "acl": ("acl:acl", "Print an ACL SETUSER command that gives a user only the permissions that its role needs."),
        "rsmq": ("rsmq:app", "Use RSMQ queues (Redis Simple Message Queue), shared with JavaScript and Rust clients."),
    },
}

COMMANDS = {
    name: Command(name, target, panel, text)
    for panel, commands in _TABLE.items()
    for name, (target, text) in commands.items()
}
