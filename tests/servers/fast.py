"""What `make test-fast` leaves out: tests on other servers than the embedded one, and tests that take their time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: Files whose tests wait for leases, outages or child processes, or go through many cases: seconds each.
SLOW: set[str] = set()


def is_fast(item: pytest.Item) -> bool:
    """Return whether a test belongs to `make test-fast`."""
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("server_kind", "valkey") if callspec else "valkey"
    own_servers = {"fresh_server", "fresh_sentinel"} & set(getattr(item, "fixturenames", ()))
    spark = item.get_closest_marker("spark_session") or item.get_closest_marker("spark_cluster")
    return kind == "valkey" and not own_servers and not spark and item.path.stem not in SLOW
