"""Checks examples.py with mypy and pyright: they must report an error on each line marked `# E` and on no other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from servers.binaries import cache_dir

EXAMPLES = Path(__file__).with_name("examples.py")
PROJECT = Path(__file__).parents[2]
#: Installed by npm on first use, in the cache folder outside the checkout.
PYRIGHT = "1.1.414"


def marked() -> set[int]:
    return {number for number, line in enumerate(EXAMPLES.read_text().splitlines(), 1) if line.endswith("# E")}


def told(found: dict[int, str]) -> str:
    missing = sorted(marked() - found.keys())
    unexpected = {line: text for line, text in sorted(found.items()) if line not in marked()}
    return f"not reported: lines {missing}; reported without a mark: {json.dumps(unexpected, indent=1)}"


def test_mypy_reports_exactly_the_marked_lines(tmp_path: Path) -> None:
    command = ["--strict", "--no-error-summary", "--show-error-codes", "--config-file=", f"--cache-dir={tmp_path}"]
    environment = os.environ | {"MYPYPATH": str(PROJECT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *command, "--python-version=3.11", "--ignore-missing-imports", str(EXAMPLES)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    errors = re.findall(rf"^{re.escape(str(EXAMPLES))}:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    found = {int(line): text for line, text in errors}
    assert found.keys() == marked(), told(found) + done.stderr


def test_pyright_in_strict_mode_reports_the_same_lines(tmp_path: Path) -> None:
    program = pyright()
    configuration = {
        "include": [EXAMPLES.name],
        "extraPaths": [str(PROJECT / "src")],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        # Expressions that only show a type, and coroutines that are never awaited because the call is an error.
        "reportUnusedExpression": False,
        "reportUnusedCoroutine": False,
    }
    path = tmp_path / "pyrightconfig.json"
    path.write_text(json.dumps(configuration))
    shutil.copy(EXAMPLES, tmp_path)  # pyright only checks files below the folder of its configuration
    done = subprocess.run(
        [program, "--outputjson", "--pythonpath", sys.executable, "-p", str(path)], capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    found = {
        one["range"]["start"]["line"] + 1: f"{one['message']} ({one.get('rule')})"
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    }
    assert found.keys() == marked(), told(found)


def pyright() -> str:
    """Return the path of pyright, installed if necessary; skip the test if it cannot be installed."""
    folder = cache_dir() / f"pyright-{PYRIGHT}"
    program = folder / "node_modules" / ".bin" / "pyright"
    if program.exists():
        return str(program)
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("pyright needs node and npm, which are not installed")
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--no-audit", "--no-fund", "--loglevel=error"]
    done = subprocess.run(
        [npm, "install", "--prefix", str(folder), *options, f"pyright@{PYRIGHT}"], capture_output=True, text=True
    )
    if done.returncode or not program.exists():
        said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        if os.environ.get("CI") == "true":
            pytest.fail(f"pyright could not be installed: {said[0]}")
        pytest.skip(f"pyright could not be installed: {said[0]}")
    return str(program)
