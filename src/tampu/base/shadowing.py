"""Handles user files that shadow a standard-library module: a `queue.py` breaks every import of `queue`.

Four places deal with such files, each with a case that the others cannot handle:

- Worker processes are started with `python -P`, which keeps the current folder out of `sys.path` while they import.
- `index_behind_stdlib` is where the app's folder is then inserted: processes for `process=True` tasks copy that path
  before they import anything.
- In the user's own program, Python has put the program's folder first. There `tampu.redis.client` imports `queue` when
  it is loaded, and not minutes later when asyncio resolves a host name in a thread.
- `explained` turns the ImportError of such a program into one that names the file.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def index_behind_stdlib() -> int:
    """Return the index in `sys.path` after the standard library and before installed packages."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {folder for folder in sys.path if folder.endswith("lib-dynload")}  # extension modules
    return max((index + 1 for index, folder in enumerate(sys.path) if folder in own), default=0)


def explained(error: ImportError) -> ImportError:
    """Return an error that names the shadowing files, or the same error if there are none."""
    names = ", ".join(files_in_the_way())
    if not names:
        return error
    return ImportError(f"{names} shadows the standard-library module of the same name; rename it ({error})")


def files_in_the_way() -> list[str]:
    """Return the files and packages that shadow a standard-library module."""
    own = sysconfig.get_path("stdlib")
    before = sys.path[: sys.path.index(own)] if own in sys.path else sys.path[:1]
    found = []
    for folder in before:
        path = Path(folder or os.getcwd())
        if path.is_dir():
            candidates = [*path.glob("*.py"), *(init.parent for init in path.glob("*/__init__.py"))]
            found += [str(file) for file in sorted(candidates) if file.stem in sys.stdlib_module_names]
    return found
