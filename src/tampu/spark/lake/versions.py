"""`lake_versions`: one row with the versions of all tables that belong together, published at the end of a run.

The tables change one after the other. Readers that need them to agree, such as the report, open each at its published
version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from tampu.errors import ConfigError
from tampu.spark.lake.folder import is_table
from tampu.spark.lake.table import CONFIGURATION

if TYPE_CHECKING:
    from pathlib import Path

NAME = "lake_versions"
#: Layout of the lake's folder. A lake with a higher number was written by a newer version of tampu.
FORMAT = 2
#: Version of what the columns of silver and gold mean. Tables of another version are computed again from bronze.
DEFINITIONS = 3


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
