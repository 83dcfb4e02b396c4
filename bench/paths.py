"""Paths of the checkout, and of folders in it that are not packages."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Files of all runs, outside the repository's tracked files.
RESULTS = ROOT / "build" / "bench"
#: The run from which the published page is generated, with every sample. Thousands of lines: not in the repository.
PUBLISHED = RESULTS / "published.json"

# At the end of the path, so that `tests/redis` does not shadow the redis package.
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]
