"""Logs of long-running commands, written to stderr as text lines or as one JSON object per line."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback

from tampu.cli.errors import check_choice
from tampu.cli.output import printable
from tampu.cli.units import iso, time_of_day

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


def check_log_options(log_format: str, level: str) -> None:
    """Raise `UsageError` for an unknown log format or level."""
    check_choice("--log", log_format, FORMATS)
    check_choice("--log-level", level, LEVELS)


def set_up_logs(log_format: str, level: str, role: str) -> None:
    """Send all logs of this process to stderr. `role` names the process, for example `worker` or `worker-2`."""
    check_log_options(log_format, level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(role) if log_format == "json" else _Text(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # if stderr is closed, there is nowhere to report it
    logging.captureWarnings(True)


def silence_py4j() -> None:
    """Silence the logs of the bridge to Java: a signal interrupts its calls, which is not an error."""
    for name in ("py4j", "py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def fields(**values: object) -> dict[str, object]:
    """Return extra fields for a JSON log line: `logger.info("...", extra=fields(job_id=...))`."""
    return {"fields": values}


class _Text(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = f"{time_of_day(record.created * 1000)} {record.levelname.lower():<7} {self._role}[{os.getpid()}] "
        line += printable(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            line += "\n" + "\n".join(map(printable, trace.split("\n")))
        return line


class _Json(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, object] = {
            "ts": iso(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "role": self._role,
            "pid": os.getpid(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            values["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        from tampu.cli.payloads import jsonable  # loads the wire format, which a supervisor does not need

        return json.dumps(jsonable(values), allow_nan=False)
