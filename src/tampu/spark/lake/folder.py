"""A lake as a whole: where it may be, the lock that keeps a second pipeline out, and the published versions."""

from __future__ import annotations

import fcntl
import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import write_deltalake

from tampu.errors import ConfigError
from tampu.spark.lake.store import Store
from tampu.spark.lake.table import CONFIGURATION, open_delta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

#: The file in a local lake for the output of Java and Spark: dozens of lines that matter only when something fails.
LOG_NAME = "_spark.log"


def writable_lake(lake: str | Path | Store, options: Mapping[str, str] | None = None) -> Store:
    """Return the store of a lake that can be written; refuse a folder of other files."""
    store = Store.of(lake, options)
    store.check_writable()
    refuse_other_files(store)
    if store.folder is not None and (log := store.folder / LOG_NAME).exists():
        try:
            log.open("ab").close()
        except OSError as error:
            raise ConfigError(f"cannot write to {log}: {error.strerror}") from error
    return store


def refuse_other_files(store: Store) -> None:
    """Raise `ConfigError` if the store holds files that do not belong to a lake."""
    if any(any(store.list(part)) for part in ("bronze", NAME)):
        return
    if any(not file["path"].startswith((".", "_")) for file in store.list()):
        raise ConfigError(f"{store} holds other files and is not a lake: use an empty or a new folder")


@contextmanager
def sole_writer(lake: Store) -> Iterator[None]:
    """Keep other pipelines out of a local lake. The lock ends with the process, however that ends.

    In an object store, the second of two commits to one table fails (`Table.commit`).
    """
    if lake.folder is None:
        yield
        return
    try:
        lake.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds payloads and tracebacks
        file = (lake.folder / ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"cannot write to the lake {lake}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another pipeline writes to the lake {lake}: wait for it, or use another folder"
            ) from None
        yield


NAME = "lake_versions"
#: Layout of the lake's folder. A lake with a higher number was written by a newer version of tampu.
FORMAT = 3
#: Version of what the columns of silver and gold mean. Tables of another version are computed again from bronze.
DEFINITIONS = 5


@dataclass
class LakeVersion:
    """The published state of a lake."""

    #: Counts the publications.
    round: int = 0
    #: Table to its version.
    tables: dict[str, int] = field(default_factory=dict)
    #: Per stream and queue: entries that were trimmed before they could be landed.
    trimmed: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Per stream and queue: rows that retention removed from bronze.
    retired: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Bronze has no rows of jobs before this day; silver and gold keep what they had.
    retained_from: str = ""
    published_at: str = ""
    format: int = FORMAT

    @classmethod
    def load(cls, lake: Store | Path) -> LakeVersion:
        """Return the published state; an initial one where nothing was published yet."""
        store = Store.of(lake) / NAME
        table = open_delta(store)
        if table is None:
            return cls()
        (file,) = pa.table(table.get_add_actions())["path"].to_pylist()
        (row,) = store.parquet(file).to_pylist()
        found: dict[str, Any] = json.loads(row["state"])
        if found["format"] > FORMAT:
            raise ConfigError(
                f"the lake {lake} has format {found['format']}, and this version of tampu knows up to {FORMAT}: "
                "upgrade tampu"
            )
        return cls(**found)

    def publish(self, lake: Store | Path) -> None:
        """Make this the published state."""
        self.round += 1
        self.published_at = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [{"table": name, "version": version} for name, version in sorted(self.tables.items())]
        table = pa.table(
            {
                "round": pa.array([self.round], pa.int64()),
                "published_at": pa.array([datetime.now(UTC)], pa.timestamp("us", "UTC")),
                "tables": pa.array([rows], pa.list_(pa.struct([("table", pa.string()), ("version", pa.int64())]))),
                "state": pa.array([json.dumps(asdict(self))], pa.string()),
            }
        )
        store = Store.of(lake) / NAME
        write_deltalake(
            store.uri, table, mode="overwrite", configuration=CONFIGURATION, storage_options=store.delta_options
        )
