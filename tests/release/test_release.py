"""The Makefile and the gates of `make release` and `make coverage`: each says what is wrong and what to do."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
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


@pytest.fixture
def built(release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a package, and its provenance."""
    monkeypatch.setattr(release, "DIST", tmp_path)
    package = tmp_path / "tampu-1.2.3.tar.gz"
    package.write_bytes(b"package")
    path: Path = release.write_provenance(Path(sys.executable).parent, [package], "1.2.3")
    return path


def test_the_provenance_names_the_files_the_commit_the_locks_and_the_tools(release: Any, built: Path) -> None:
    statement = json.loads(built.read_text())
    digest = hashlib.sha256(b"package").hexdigest()
    assert statement["subject"] == [{"name": "tampu-1.2.3.tar.gz", "digest": {"sha256": digest}}]
    source, *locks = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=SCRIPTS, check=True, capture_output=True, text=True).stdout
    assert source["digest"] == {"gitCommit": head.strip()}
    for lock in locks:
        text = (release.PROJECT / lock["name"]).read_bytes()
        assert lock["digest"] == {"sha256": hashlib.sha256(text).hexdigest()}
    tools = statement["predicate"]["runDetails"]["builder"]["version"]
    assert tools["python"] == platform.python_version()
    assert tools["hatchling"] == importlib.metadata.version("hatchling")


def test_files_that_differ_from_their_provenance_are_refused(
    release: Any, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = built.parent / "tampu-1.2.3.tar.gz"
    assert release.main(["verify", str(built)]) == 0
    package.write_bytes(b"another")
    assert release.main(["verify", str(built)]) == 1
    assert "tampu-1.2.3.tar.gz is not the file that was built" in capsys.readouterr().err
    package.unlink()
    assert release.main(["verify", str(built)]) == 1
    assert "tampu-1.2.3.tar.gz is missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"subject": []}', '{"subject": [{"name": "a"}]}'])
def test_a_provenance_that_names_no_files_is_refused(release: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "provenance.json").write_text(text)
    assert release.main(["verify", str(tmp_path / "provenance.json")]) == 1


@pytest.mark.timeout(300)
def test_a_build_of_the_same_files_gives_the_same_packages(tmp_path: Path) -> None:
    """People can check a release by building it again."""
    for folder in ("first", "second"):
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / folder)]
        # Without coverage, with which a build takes a minute.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        environment["SOURCE_DATE_EPOCH"] = "1750000000"
        subprocess.run(command, cwd=SCRIPTS.parent, env=environment, check=True, capture_output=True, timeout=140)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("first", "second")
    )
    assert len(first) == 2
    assert first == second


def test_the_build_backend_is_the_locked_one(release: Any) -> None:
    locked = (release.PROJECT / "requirements" / "build.txt").read_text()
    system = tomllib.loads((release.PROJECT / "pyproject.toml").read_text())["build-system"]
    assert system["requires"] == re.findall(r"^(hatchling==[\w.]+)", locked, re.MULTILINE)


def test_the_actions_of_the_workflows_are_named_by_commit(release: Any) -> None:
    used = [
        line
        for path in (release.PROJECT / ".github" / "workflows").iterdir()
        for line in re.findall(r"uses: (.*)", path.read_text())
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def dry_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask what a command would run. The variables of a `make test` around this test do not count."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=SCRIPTS.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["chaos", "help", "test"])
def test_make_refuses_a_variable_that_it_does_not_use(target: str) -> None:
    done = dry_make(target, "SECONDS=60", "MINUTES=1")
    assert done.returncode == 2
    assert "unknown variable: SECONDS; allowed: ARGS COVERAGE JOBS MINUTES" in done.stderr


def test_make_takes_every_variable_that_it_uses() -> None:
    text = (SCRIPTS.parent / "Makefile").read_text()
    used = {*re.findall(r"^(\w+) \?=", text, re.MULTILINE), *re.findall(r"\$\((?:if |or )?([A-Z_]+)[,)]", text)}
    own = {*re.findall(r"^(\w+) :?=", text, re.MULTILINE), "MAKE", "MAKEFILE_LIST"} - {"VENV"}
    allowed = re.search(r"^SETTINGS := (.*)$", text, re.MULTILINE)
    assert allowed is not None
    assert {*allowed[1].split()} == used - own
    assert dry_make("help", *(f"{name}=1" for name in used - own)).returncode == 0


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
