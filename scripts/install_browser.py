"""Installs Debian's Chromium, which the tests of the pipeline's report use; without root it only prints one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def main() -> int:
    if shutil.which("chromium"):
        return 0
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print("browser: chromium is missing and cannot be installed without root: its tests are skipped", flush=True)
        return 1 if os.environ.get("CI") == "true" else 0
    print("browser: installing Debian's chromium (about a minute)", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"browser: {' '.join(command)} failed: {done.stderr.strip()[-500:]}", flush=True)
            return 1 if os.environ.get("CI") == "true" else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
