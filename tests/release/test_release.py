"""The gates of `make release` and `make coverage`: each says what is wrong and what to do."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

CHANGELOG = "# Changelog\n\n## Unreleased\n{unreleased}\n## 1.2.3 - 2026-11-30\n\n### Added\n- All of it.\n"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("release")


@pytest.fixture
def check_coverage(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("check_coverage")


def test_the_version_is_the_same_everywhere(release: Any) -> None:
    release.check_version(release.project_version())
    with pytest.raises(release.Refused, match=r"pyproject\.toml says version .*, not 9\.9\.9"):
        release.check_version("9.9.9")


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3-beta", ""])
def test_a_version_that_is_none_is_refused(release: Any, version: str) -> None:
    with pytest.raises(release.Refused, match="is not a version"):
        release.check_version(version)


def test_a_changelog_that_was_cut_is_accepted(release: Any) -> None:
    release.check_changelog("1.2.3", CHANGELOG.format(unreleased=""))
    release.check_changelog("1.2.3", "## 1.2.3 - 2026-11-30\n")


def test_a_changelog_that_was_not_cut_is_refused(release: Any) -> None:
    with pytest.raises(release.Refused, match=r"no section '## 1\.2\.4 - YYYY-MM-DD'"):
        release.check_changelog("1.2.4", CHANGELOG.format(unreleased=""))
    with pytest.raises(release.Refused, match="still has entries under 'Unreleased'"):
        release.check_changelog("1.2.3", CHANGELOG.format(unreleased="\n### Fixed\n- One more.\n"))


def summary(covered: int, of: int = 100) -> dict[str, int]:
    return {"covered_lines": covered, "num_statements": of, "covered_branches": 0, "num_branches": 0}


def test_a_file_that_is_hardly_tested_must_be_listed(check_coverage: Any) -> None:
    files = {"tampu/good.py": summary(5000, 5000), "tampu/bad.py": summary(40)}
    (complaint,) = check_coverage.find_complaints(files, {})
    assert complaint.startswith("tampu/bad.py: 40.0 % of its lines are covered, at least 85 % must be")
    assert check_coverage.find_complaints(files, {"tampu/bad.py": {"percent": 40, "reason": "..."}}) == []


def test_the_list_of_what_is_not_covered_stays_true(check_coverage: Any) -> None:
    files = {"tampu/better.py": summary(80)}
    listed = {"tampu/better.py": {"percent": 40}, "tampu/gone.py": {"percent": 10}}
    complaints = check_coverage.find_complaints(files, listed)
    assert [complaint.split(":")[0].split(" ")[0] for complaint in complaints] == [
        "80.00",
        "tampu/better.py",
        "tampu/gone.py",
    ]


def test_less_than_95_percent_of_all_lines_is_refused(check_coverage: Any) -> None:
    (complaint,) = check_coverage.find_complaints({"tampu/a.py": summary(94)}, {})
    assert complaint == "94.00 % of all lines are covered, at least 95 % must be"


def test_the_classifiers_promise_the_pythons_that_the_tests_run_under(release: Any) -> None:
    project = tomllib.loads((release.PROJECT / "pyproject.toml").read_text())["project"]
    promised = {name.rpartition(" ")[2] for name in project["classifiers"] if ":: Python :: 3." in name}
    built = re.search(r"^PYTHONS \?= (.+)$", (release.PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert built is not None
    assert promised == {project["requires-python"].removeprefix(">="), *built[1].split()}
