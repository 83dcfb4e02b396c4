"""Installs Debian's Chromium, which the tests of the pipeline's report use."""

from __future__ import annotations

import os
import shutil
import sys

import system_packages


def main() -> int:
    if shutil.which("chromium") or system_packages.install(["chromium"], "the tests of the pipeline's report"):
        return 0
    print("browser: without Chromium the tests of the report are skipped; with CI=true they fail", flush=True)
    return 1 if os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main())
