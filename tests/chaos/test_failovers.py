"""The record of a failover: it begins with the last write that the new master has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from chaos.failovers import KEY, FailoverWatch
from chaos.records import Fault, Recorder, read_history
from servers.process import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from servers.process import Server


def fail_over(master: Server, replica: Server) -> tuple[int, int]:
    """Promote the replica, let the master go on for a while, then demote it; return when the steps were done."""
    replica.client().execute_command("REPLICAOF", "NO", "ONE")
    promoted_at = time.monotonic_ns()
    eventually(lambda: stamp_on(master) > promoted_at, "the old master takes writes that are lost")
    master.client().execute_command("REPLICAOF", *replica.address)
    return promoted_at, time.monotonic_ns()


def stamp_on(server: Server) -> int:
    return int((server.client().get(KEY) or b"- 0").split()[1])


def failovers_of(folder: Path) -> list[Fault]:
    return read_history(folder, 4.0).faults


def test_a_failover_begins_with_the_last_write_of_the_new_master(
    fresh_server: Callable[..., Server], tmp_path: Path
) -> None:
    master = fresh_server()
    replica = fresh_server(replicaof=master)
    watch = FailoverWatch(master, replica, Recorder(tmp_path, "injector"))
    watch.start()
    try:
        kept_at = time.monotonic_ns()
        eventually(lambda: stamp_on(replica) > kept_at, "the replica has a stamp")
        promoted_at, demoted_at = fail_over(master, replica)
        eventually(lambda: watch.failovers == 1, "the failover is recorded")
        eventually(lambda: stamp_on(master) > demoted_at, "the old master replicates the new one")
        back_at, _ = fail_over(replica, master)
        eventually(lambda: watch.failovers == 2, "the failover back is recorded")
    finally:
        watch.stop()
    there, back = failovers_of(tmp_path)
    assert kept_at < there.begin < promoted_at < demoted_at < there.end
    assert demoted_at < back.begin < back_at < back.end


def test_a_new_master_that_was_never_in_sync_has_lost_everything(
    fresh_server: Callable[..., Server], tmp_path: Path
) -> None:
    master, replica = fresh_server(), fresh_server()
    replica.client().set(KEY, f"{replica.port} {time.monotonic_ns()}")  # a stamp of an earlier time as master
    before = time.monotonic_ns()
    watch = FailoverWatch(master, replica, Recorder(tmp_path, "injector"))
    begin_at = time.monotonic_ns()
    watch.start()
    try:
        fail_over(master, replica)
        eventually(lambda: watch.failovers == 1, "the failover is recorded")
    finally:
        watch.stop()
    (fault,) = failovers_of(tmp_path)
    assert before < fault.begin < begin_at
