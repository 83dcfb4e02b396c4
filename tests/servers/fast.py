"""What `make test-fast` leaves out, and which tests `make test` repeats on every kind of server.

`make test-fast` leaves out tests on other servers than the embedded one, and tests that take their time. Single slow
tests are marked `slow`; the folders and files listed here are not even imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: Folders whose tests start other programs or servers.
SLOW_FOLDERS = {"bench", "docs", "embedded", "interop", "servers", "typing", "upgrade"}

#: Files whose tests wait for leases, outages or child processes, or go through many cases: seconds each.
SLOW_FILES = {
    "test_chain_machine",
    "test_cli_bad_input",
    "test_cli_demo",
    "test_cli_health",
    "test_cli_jobs",
    "test_cli_new",
    "test_cli_start",
    "test_cli_terminal",
    "test_cli_worker",
    "test_consumer_crashes",
    "test_consumer_endings",
    "test_consumer_leases",
    "test_consumer_outages",
    "test_consumer_processes",
    "test_consumer_refusals",
    "test_consumer_rejects",
    "test_consumer_server_faults",
    "test_consumer_shutdown",
    "test_cron_properties",
    "test_cuts",
    "test_event_loops",
    "test_full_queue",
    "test_life",
    "test_peers",
    "test_redis_acl",
    "test_rsmq_cli",
    "test_rsmq_lost_connections",
    "test_run_sync",
    "test_run_sync_stubborn",
    "test_runtime_counts",
    "test_runtime_queues",
    "test_scheduler_fires",
    "test_scheduler_races",
    "test_silent_servers",
    "test_slice",
    "test_spark_cli",
    "test_spark_slice",
    "test_testing",
}


def may_be_fast(path: Path) -> bool:
    """Return whether a folder or file may have tests that belong to `make test-fast`."""
    return path.stem not in SLOW_FILES and SLOW_FOLDERS.isdisjoint(path.parts)


def is_fast(item: pytest.Item) -> bool:
    """Return whether a test belongs to `make test-fast`."""
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("server_kind", "valkey") if callspec else "valkey"
    own_servers = {"fresh_server", "fresh_sentinel"} & set(getattr(item, "fixturenames", ()))
    spark = item.get_closest_marker("spark_session") or item.get_closest_marker("spark_cluster")
    slow = item.get_closest_marker("slow")
    return kind == "valkey" and not own_servers and not spark and not slow


#: Folders and files whose tests run scripts or commands that differ between servers. `make test` runs them on each
#: kind of server, if they are marked `servers`; `make test-servers` does so with all tests that have that mark.
MATRIX = (
    *("bench/test_budget.py", "consume/test_consumer_outcomes.py", "interop", "maintain/test_promoter_moves.py"),
    *("maintain/test_scheduler_fires.py", "produce/conformance", "produce/test_chain.py", "redis"),
    *("rsmq/test_rsmq_operations.py", "rsmq/test_rsmq_vectors.py", "servers", "spark/test_spark_servers.py"),
)


def is_in_matrix(file: Path) -> bool:
    """Return True if `make test` runs the tests of a file on each kind of server."""
    tests = Path(__file__).parents[1]
    return any(file.is_relative_to(tests / part) for part in MATRIX)
