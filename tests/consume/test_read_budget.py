"""A read asks for as many entries as fit into its budget of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from consume.workers import consuming
from support.waiting import until
from tampu.consume.reader import FIRST_COUNT, ReadBudget
from tampu.wire.envelope import encode_envelope

if TYPE_CHECKING:
    from consume.views import WorkerView
    from tampu.wire.job import Job


def test_the_first_read_is_small_and_reads_double_while_entries_are_small() -> None:
    budget = ReadBudget(1_000_000)
    counts = []
    for _ in range(5):
        counts.append(budget.count(64))
        budget.update(counts[-1], counts[-1] * 100)
    assert counts == [FIRST_COUNT, 16, 32, 64, 64]


@pytest.mark.parametrize(("size", "count"), [(100_000, 10), (600_000, 1), (50_000_000, 1)])
def test_large_entries_are_read_in_small_batches(size: int, count: int) -> None:
    budget = ReadBudget(1_000_000)
    budget.update(8, 8 * size)
    assert budget.count(64) == count


def test_after_large_entries_small_ones_are_read_in_large_batches_again() -> None:
    budget = ReadBudget(1_000_000)
    budget.update(1, 10_000_000)
    for _ in range(6):
        budget.update(budget.count(64), 100)
    assert budget.count(64) == 64


async def test_a_worker_reads_large_entries_a_few_at_a_time(view: WorkerView) -> None:
    async def handle(job: Job[Any]) -> None:
        return None

    for number in range(40):
        view.add_fields("d", encode_envelope(f"j{number}", b"\xc6" + (900_000).to_bytes(4, "big") + b"x" * 900_000, 5))
    calls = []

    class Spy(ReadBudget):
        def update(self, entries: int, size: int) -> None:
            calls.append((entries, size))
            super().update(entries, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tampu.consume.reader.ReadBudget", Spy)
        async with consuming(view.server.url, handle, max_read_bytes=2_000_000):
            await until(view.is_settled, "all are done")
    read = [(entries, size) for entries, size in calls if entries]
    assert sum(entries for entries, _ in read) == 40
    assert all(size >= entries * 900_000 for entries, size in read)
    assert max(entries for entries, _ in read[1:]) <= 2
