"""Count the vectors of ChasquiMQ 1.3.0 that passed and print them as a table after the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

#: By group, then by number: "passed", "excepted" or "failed"; the worst of all tests that use the vector.
_outcomes: dict[str, dict[int, str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vector(group, number, excepted): uses one vector of tests/vectors")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("vector"):
        item.user_properties.append(("vector", (*mark.args, mark.kwargs["excepted"])))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "vector" and (report.when == "call" or report.failed):
            group, number, excepted = value  # type: ignore[misc]  # what the hook above put there
            group_outcomes = _outcomes.setdefault(group, {})
            if not report.passed:
                group_outcomes[number] = "failed"
            elif excepted:
                group_outcomes.setdefault(number, "excepted")
            else:
                group_outcomes.setdefault(number, "passed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _outcomes:
        return
    terminalreporter.section("vectors of ChasquiMQ 1.3.0")
    row = "{:<44} {:>7} {:>9} {:>7}"
    terminalreporter.write_line(row.format("group", "passed", "excepted", "failed"))
    sums = [0, 0, 0]
    for group, outcomes in sorted(_outcomes.items()):
        counts = [list(outcomes.values()).count(outcome) for outcome in ("passed", "excepted", "failed")]
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
        terminalreporter.write_line(row.format(group, *counts))
    terminalreporter.write_line(row.format("all", *sums))
