"""`tampu pipeline upgrade`: turns a lake of tampu 0.1 into Delta tables. Bronze's files stay where they are.

Silver and gold are computed again by the next run: their definitions have changed.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from deltalake import Schema

from tampu.errors import ConfigError
from tampu.spark.lake.bronze import LANDING, OffsetLog
from tampu.spark.lake.folder import OLD_MANIFEST, lake_folder, sole_writer
from tampu.spark.lake.table import Table
from tampu.spark.read.batch import columns_of

if TYPE_CHECKING:
    from pathlib import Path

    from tampu.spark.options import Payload, Stream

_DELTA_TYPES = {"STRING": "string", "BINARY": "binary", "BIGINT": "long", "TIMESTAMP": "timestamp"}
_PAYLOADS: dict[Stream, Payload] = {"events": "binary", "dlq": "json"}


def upgrade(lake: str | Path) -> dict[str, int]:
    """Upgrade a lake; return the rows of each table. Killed at any point, it can be run again."""
    folder = lake_folder(lake)
    if not (folder / OLD_MANIFEST).exists():
        raise ConfigError(f"{folder} is not a lake of tampu 0.1: there is no {OLD_MANIFEST}")
    rows: dict[str, int] = {}
    with sole_writer(folder):
        for stream, payload in _PAYLOADS.items():
            table = Table(folder, f"bronze/{stream}")
            log = table.path / "_spark_metadata"
            if table.version() < 0 and log.is_dir():
                OffsetLog(folder, stream).write(0, _offsets(folder / "_checkpoints" / stream, log))
                adds = [table.add_action(str(table.path / path)) for path in _committed_files(log, f"bronze/{stream}/")]
                table.commit(adds, _bronze_schema(stream, payload), {LANDING: 0})
            rows[table.name] = sum(file.rows for file in table.files())
        for stream in _PAYLOADS:
            # Spark reads only what this log names, wherever it finds one.
            shutil.rmtree(folder / "bronze" / stream / "_spark_metadata", ignore_errors=True)
        for old in ("silver", "gold", "_checkpoints"):
            shutil.rmtree(folder / old, ignore_errors=True)
        (folder / "_tables.previous.json").unlink(missing_ok=True)
        (folder / OLD_MANIFEST).unlink()  # last: it marks a lake that is still to be upgraded
    return rows


def _committed_files(log: Path, below: str) -> list[str]:
    """Return the files that Spark's sink committed, relative to the table; it noted where they were at that time."""
    newest_compact = max((_number(path) for path in log.glob("*.compact")), default=-1)
    found: list[str] = []
    for path in sorted(log.iterdir(), key=_number):
        number = _number(path)
        if path.name.startswith(".") or number < newest_compact or (number == newest_compact and path.suffix == ""):
            continue
        for line in path.read_text().splitlines()[1:]:
            name = json.loads(line)["path"]
            found.append(unquote(name.rpartition(f"/{below}")[2]))
    return found


def _offsets(checkpoint: Path, log: Path) -> dict[str, Any]:
    """Return the offsets behind the last batch that the sink committed."""
    number = max(_number(path) for path in log.iterdir() if not path.name.startswith("."))
    offsets: dict[str, Any] = json.loads((checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    # Where that batch was cut into partitions does not matter: it is not read again.
    return {queue: {"cuts": [], **offset} for queue, offset in offsets.items()}


def _number(path: Path) -> int:
    stem = path.name.removesuffix(".compact")
    return int(stem) if stem.isdigit() else -1


def _bronze_schema(stream: Stream, payload: Payload) -> Schema:
    columns = columns_of(stream, payload) | {"date": "STRING"}
    fields = [
        {"name": name, "type": _DELTA_TYPES[kind], "nullable": True, "metadata": {}} for name, kind in columns.items()
    ]
    return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
