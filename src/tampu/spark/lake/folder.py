"""The folder of a lake: where it may be, the lock that keeps a second pipeline out, and the published versions."""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from tampu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def retention(hours: int) -> dict[str, str]:
    """Return the properties of a table whose versions of the last hours can be read."""
    kept = f"interval {hours} hours"
    # Without automatic cleanup: a checkpoint during a run would delete the log of the version that is published.
    return {
        "delta.logRetentionDuration": kept,
        "delta.deletedFileRetentionDuration": kept,
        "delta.enableExpiredLogCleanup": "false",
    }


#: A checkpoint of the log every 20 commits: opening a table reads at most that many log files. Checkpoints drop names
#: of removed files that are older than the retention, which `vacuum` sets; `shorten_logs` deletes old log files.
CONFIGURATION = {
    "delta.checkpointInterval": "20",
    **retention(2),
}
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")

#: The file in the lake for the output of Java and Spark: dozens of lines that matter only when something fails.
LOG_NAME = "_spark.log"


def lake_folder(lake: str | Path) -> Path:
    """Return the folder of a lake; refuse a URI, which would be created as a local folder named `s3a:`."""
    if found := _URI.match(str(lake)):
        rest = str(lake)[found.end() :]
        if found[1].lower() == "file":
            raise ConfigError(f"lake must be a path; got the URI file:///{rest}: pass the path /{rest}")
        uri = f"{found[1]}://{rest}"  # a Path has lost one of the slashes
        raise ConfigError(
            f"lake must be a folder of a local or mounted file system; got the URI {uri} "
            "(object stores are not supported yet)"
        )
    folder = Path(lake).absolute()
    if unquote(str(folder)) != str(folder):
        raise ConfigError(f"the path of a lake must not contain percent escapes such as %20, got {folder}")
    return folder


def writable_lake(lake: str | Path) -> Path:
    """Return the folder of a lake that can be written; refuse a folder of other files."""
    folder = lake_folder(lake)
    # Not by `Path.exists`, which raises in a folder that must not be read.
    _check_access(next(path for path in (folder, *folder.parents) if os.path.exists(path)))
    refuse_other_files(folder)
    _check_permissions(folder)
    return folder


def refuse_other_files(folder: Path) -> None:
    """Raise `ConfigError` if the folder holds files that do not belong to a lake."""
    if (
        folder.is_dir()
        and not is_lake(folder)
        and any(not path.name.startswith((".", "_")) for path in folder.iterdir())
    ):
        raise ConfigError(f"{folder} holds other files and is not a lake: use an empty or a new folder")


def _check_permissions(folder: Path) -> None:
    """Refuse a lake with a folder or a log of Spark that cannot be written, such as one that was created by root."""

    def refuse(error: OSError) -> None:
        if isinstance(error, PermissionError):
            _check_access(error.filename)

    for path, _, _ in os.walk(folder, onerror=refuse):
        _check_access(path)
    if (folder / LOG_NAME).exists():
        _check_access(folder / LOG_NAME, os.W_OK)


def _check_access(path: str | Path, mode: int = os.R_OK | os.W_OK | os.X_OK) -> None:
    if not os.access(path, mode, effective_ids=os.access in os.supports_effective_ids):
        raise ConfigError(f"cannot write to {path}: check its owner, its mode and how its file system is mounted")


def is_lake(folder: Path) -> bool:
    """Return whether the folder holds a lake, even one whose first run was interrupted."""
    return any((folder / name).is_dir() for name in ("bronze", "lake_versions", "_offsets"))


def is_table(folder: Path) -> bool:
    """Return whether the folder holds a Delta table, which begins with its first commit.

    The folder of its log is not enough: delta-rs creates it before that commit, which may fail on a full disk.
    """
    log = folder / "_delta_log"
    try:
        names = os.listdir(log)
    except PermissionError:
        raise ConfigError(f"cannot read {log}: check the owner and the mode of the lake's folders") from None
    except OSError:  # it does not exist
        return False
    return any(name.endswith((".json", ".parquet")) for name in names)


@contextmanager
def sole_writer(lake: Path) -> Iterator[None]:
    """Keep other pipelines out of the lake. The lock ends with the process, however that ends."""
    try:
        lake.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds payloads and tracebacks
        file = (lake / ".lock").open("a")
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
FORMAT = 2
#: Version of what the columns of silver and gold mean. Tables of another version are computed again from bronze.
DEFINITIONS = 4


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
    def load(cls, lake: Path) -> LakeVersion:
        """Return the published state; an initial one where nothing was published yet."""
        if not is_table(lake / NAME):
            return cls()
        # Not by `to_pyarrow_table`: see `rows.query_table`.
        (file,) = pa.table(DeltaTable(str(lake / NAME)).get_add_actions())["path"].to_pylist()
        (row,) = pq.ParquetFile(lake / NAME / file).read().to_pylist()
        found: dict[str, Any] = json.loads(row["state"])
        if found["format"] > FORMAT:
            raise ConfigError(
                f"the lake {lake} has format {found['format']}, and this version of tampu knows up to {FORMAT}: "
                "upgrade tampu"
            )
        return cls(**found)

    def publish(self, lake: Path) -> None:
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
        write_deltalake(str(lake / NAME), table, mode="overwrite", configuration=CONFIGURATION)
