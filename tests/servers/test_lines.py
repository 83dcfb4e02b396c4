"""The reader of files that other processes append lines to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.lines import whole_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert whole_lines(log) == []
    log.write_text("end this 0 plain 0")
    assert whole_lines(log) == []
    log.write_text("begin this 0 plain 01J\nend this 0 plain 0")
    assert whole_lines(log) == ["begin this 0 plain 01J"]
    log.write_text("begin this 0 plain 01J\nend this 0 plain 01J\n")
    assert whole_lines(log) == ["begin this 0 plain 01J", "end this 0 plain 01J"]
