"""Which files the silver and gold tables consist of: one small file, replaced in one step.

Tables are written beside what is there, then the manifest is swapped: whoever reads sees all tables as they were before
a run or as they are after it, and a run that is killed leaves nothing behind but files nobody names, which the next
run removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

FILE_NAME = "_tables.json"
PREVIOUS_FILE_NAME = "_tables.previous.json"
#: Folders of the lake that the manifest rules over.
TABLES = ("silver/jobs", "gold/throughput", "gold/latency", "gold/failures", "gold/slo", "gold/dlq_clusters")


def lake_folder(lake: str | Path) -> Path:
    """Return the folder of a lake; refuse a URI, which would be created as a local folder named `s3a:`."""
    if _URI.match(str(lake)):
        raise ConfigError(
            f"lake must be a folder of a local or mounted file system, got the URI {lake}: "
            "object stores are not supported yet"
        )
    return Path(lake).absolute()


@dataclass
class Manifest:
    """The state of silver and gold."""

    #: Counts the swaps.
    version: int = 0
    #: Table to partition (`queue=q/date=d`) to the folder of its files, relative to the lake.
    tables: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Bronze partition to what it had when silver was last computed from it: a digest of its files, and its rows.
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Per stream and queue: entries ever added up to where bronze has read.
    added: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Per stream and queue: entries that were trimmed before bronze came to them.
    trimmed: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def load(cls, lake: Path, name: str = FILE_NAME) -> Manifest:
        """The manifest of a lake; an empty one where there is none yet."""
        try:
            text = (lake / name).read_text()
        except FileNotFoundError:
            return cls()
        return cls(**json.loads(text))

    def swap_in(self, lake: Path) -> None:
        """Make this the lake's state, in one step that survives a crash."""
        self.version += 1
        current = lake / FILE_NAME
        if current.exists():
            _write(lake / PREVIOUS_FILE_NAME, current.read_text())
        _write(current, json.dumps(self.__dict__, indent=1, sort_keys=True))

    def folders(self, lake: Path, table: str) -> list[str]:
        """The folders a table consists of."""
        return [str(lake / folder) for folder in sorted(self.tables.get(table, {}).values())]

    def partitions(self, table: str) -> dict[str, str]:
        """Partition to folder, to be changed."""
        return self.tables.setdefault(table, {})

    def replace(self, table: str, names: list[str], written: dict[str, str]) -> None:
        """Put the folders that were written in place of these partitions."""
        partitions = self.partitions(table)
        for name in names:
            partitions.pop(name, None)
        partitions.update(written)


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def remove_unnamed(lake: Path) -> int:
    """Remove what neither this state nor the one before names (somebody may still be reading that); how many."""
    kept = {
        folder
        for name in (FILE_NAME, PREVIOUS_FILE_NAME)
        for partitions in Manifest.load(lake, name).tables.values()
        for folder in partitions.values()
    }
    removed = 0
    for table in TABLES:
        for run in sorted((lake / table).glob("run=*")):
            leaves = [path for path in run.glob("*/*") if path.is_dir()]
            for leaf in leaves:
                if str(leaf.relative_to(lake)) not in kept:
                    shutil.rmtree(leaf, ignore_errors=True)
                    removed += 1
            if not any(leaf.exists() for leaf in leaves):
                shutil.rmtree(run, ignore_errors=True)
    return removed


@contextmanager
def sole_writer(lake: Path) -> Iterator[None]:
    """Keeps a second pipeline from the same lake; the lock ends with the process, however it ends."""
    lake.mkdir(parents=True, exist_ok=True)
    with (lake / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another pipeline writes to the lake {lake}: wait for it, or use another folder"
            ) from None
        yield


def read_rows(lake: Path, table: str) -> list[dict[str, Any]]:
    """A small table without Spark, for reports."""
    dataset = _dataset(lake, table)
    return [] if dataset is None else dataset.to_table().to_pylist()


def count_by_minute(lake: Path, table: str, column: str) -> list[tuple[datetime, int]]:
    """How many rows fall on each minute by a column of times, for jobs whose creation is known."""
    import pyarrow.compute as pc

    dataset = _dataset(lake, table)
    counts: Counter[datetime] = Counter()
    # Batch by batch: a silver table may be larger than memory.
    for batch in (
        [] if dataset is None else dataset.to_batches(columns=[column], filter=pc.field("created_at").is_valid())
    ):
        minutes = pc.floor_temporal(batch.column(0).drop_null(), unit="minute")
        for item in pc.value_counts(minutes).to_pylist():
            counts[item["values"]] += item["counts"]
    return sorted(counts.items())


def _dataset(lake: Path, table: str) -> Any:
    import pyarrow.dataset as ds

    folders = [Path(folder) for folder in Manifest.load(lake).folders(lake, table)]
    files = [str(file) for folder in folders for file in sorted(folder.glob("*.parquet"))]
    return ds.dataset(files, format="parquet") if files else None
