"""Handlers that fork: the child must not continue as a second worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.waiting import until

if TYPE_CHECKING:
    from consume.views import WorkerView
    from consume.workers import Fleet

EXIT_CODES = {"exit": "3", "raise": "1", "return": "0"}


@pytest.mark.parametrize(
    ("handler", "options", "expected"),
    [
        ("forking", {}, EXIT_CODES | {"await": "1"}),
        ("forking", {"uvloop": True}, EXIT_CODES | {"await": "1"}),
        ("forking", {"process": True}, EXIT_CODES),
        ("forking_in_a_thread", {}, EXIT_CODES),
        ("forking_in_a_thread", {"process": True}, EXIT_CODES),
    ],
    ids=["loop", "uvloop", "loop in a process", "thread", "process"],
)
async def test_the_child_of_a_fork_ends_when_it_leaves_the_handler(
    view: WorkerView, fleet: Fleet, handler: str, options: dict[str, bool], expected: dict[str, str]
) -> None:
    worker = fleet.start(view.server.url, handler, max_attempts=1, **options)
    for way in expected:
        view.add(way)
    await until(lambda: len(fleet.journal.of("ended")) >= len(expected), "all have run", 60)
    await until(view.is_settled, "all are done")
    ended = {words[1]: words[2] for words in fleet.journal.lines() if words[0] == "ended"}
    assert ended == expected
    assert not view.dead_letters()
    assert len(fleet.journal.of("forked")) == len(expected)
    assert not fleet.journal.of("awaited")
    assert worker.stop() == 0
