"""The server that all contestants are measured on."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench.paths  # noqa: F401 - makes the tests' servers importable

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def fresh_server(kind: str = "redis86") -> Iterator[Any]:
    """Start a server without persistence on a free port, and stop it at the end of the block."""
    from servers.shared import make_server

    with tempfile.TemporaryDirectory() as folder:
        server = make_server(kind, Path(folder) / kind)
        server.start()
        try:
            yield server
        finally:
            server.stop()
