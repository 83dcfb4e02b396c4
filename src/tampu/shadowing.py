"""Finds files that take the place of Python's own modules: a queue.py beside the program breaks whatever needs queue.

Asked only when an import has failed, to say why in a line instead of a riddle.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def files_in_the_way() -> list[str]:
    """Files and packages that are found before modules of the same name of Python's own."""
    own = sysconfig.get_path("stdlib")
    before = sys.path[: sys.path.index(own)] if own in sys.path else sys.path[:1]
    found = []
    for folder in before:
        path = Path(folder or os.getcwd())
        if path.is_dir():
            candidates = [*path.glob("*.py"), *(init.parent for init in path.glob("*/__init__.py"))]
            found += [str(file) for file in sorted(candidates) if file.stem in sys.stdlib_module_names]
    return found


def explained(error: ImportError) -> ImportError:
    """The same error, or one that names the file at fault."""
    files = files_in_the_way()
    if not files:
        return error
    names = ", ".join(files)
    return ImportError(f"{names} takes the place of a module of Python's own of that name: rename it ({error})")
