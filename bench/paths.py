"""Where things are: the checkout, and the parts of it that are no packages."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Every run's file, outside what is kept in the repository.
RESULTS = ROOT / "build" / "bench"
#: The run that the published page was made from, with every sample. Thousands of lines: not kept in the repository.
PUBLISHED = RESULTS / "published.json"

# At the end: `tests/redis` must not hide the package.
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]
