"""Installs Debian's Chromium, which the tests of the report and of the dashboard use, and Playwright, which drives it.

Playwright's package brings its driver, and downloads no browser.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import system_packages

LOCKED = Path(__file__).parents[1] / "requirements" / "browser.txt"


def main() -> int:
    purpose = "the tests of the report and of the dashboard"
    has_chromium = bool(shutil.which("chromium")) or system_packages.install(["chromium"], purpose)
    if has_chromium and _has_driver():
        return 0
    print(f"browser: without Chromium and Playwright {purpose} are skipped; with CI=true they fail", flush=True)
    return 1 if os.environ.get("CI") == "true" else 0


def _has_driver() -> bool:
    """Install Playwright into this environment if it is not there, and return whether it is."""
    if importlib.util.find_spec("playwright") and importlib.util.find_spec("axe_playwright_python"):
        return True
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return not subprocess.run([*pip, "--require-hashes", "--no-deps", "-r", str(LOCKED)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
