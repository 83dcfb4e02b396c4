"""Generates the tables of docs/reference/ from the code: settings, errors, and reasons for dead letters.

python scripts/make_reference.py          # write the tables
python scripts/make_reference.py --check  # exit with 1 if they are not up to date

A table is between `<!-- table: name -->` and `<!-- /table -->`; the text around it is written by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tampu
from tampu import config, errors
from tampu.consume.handlers import HandlerError, UnrecoverableError
from tampu.wire import retry

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

#: Defaults of fields that are created for each object.
MADE = {
    "consumer_id": "`'<host>:<pid>'`",
    "holder_id": "`'p-<uuid>'`",
    "metrics": "no metrics",
    "retry": "`RetryConfig()`",
    "scheduler": "`SchedulerConfig()`",
}


def settings_table(kind: type[Any], module: ModuleType) -> str:
    """Return a table with one row per field of a settings class: name, default and the comment above the field."""
    comments = {"queue_name": "Queue name; part of every key."} | field_comments(module, kind.__name__)
    rows = [
        f"| `{field.name}` | {default_of(kind, field)} | {comments.get(field.name, '')} |"
        for field in dataclasses.fields(kind)
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def default_of(kind: type[Any], field: dataclasses.Field[Any]) -> str:
    if field.name == "holder_id":
        return MADE["holder_id"].replace("p-", "s-") if kind is config.SchedulerConfig else MADE["holder_id"]
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`" if not isinstance(field.default, int) else number(field.default)
    return MADE[field.name]


def number(value: int) -> str:
    return f"`{value}`" if isinstance(value, bool) or value < 10_000 else f"`{value:_}`"


def field_comments(module: ModuleType, class_name: str) -> dict[str, str]:
    """Return the `#:` comments above the fields of a class, without their sentence about the default."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    found: dict[str, str] = {}
    [made] = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = comment_above(lines, node.lineno - 2)
    return {name: text for name, text in found.items() if text}


def comment_above(lines: list[str], last: int) -> str:
    comment: list[str] = []
    while lines[last].strip().startswith("#:"):
        comment.insert(0, lines[last].strip().removeprefix("#:").strip())
        last -= 1
    text = re.sub(r" Defaults to [^.]*(\.\d+)?[^.]*\.$", "", " ".join(comment))
    return text.replace("|", "\\|")


def retry_table() -> str:
    """Return the table in the docstring of the class."""
    doc = inspect.getdoc(retry.RetryConfig) or ""
    return "\n".join(line for line in doc.splitlines() if line.startswith("|"))


def errors_table() -> str:
    """Return a table of all errors with their code, base classes, and the first line of their docstring."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Error)]
    rows = ["| error | code | is also a | when |", "|---|---|---|---|"]
    for kind in sorted({*kinds, HandlerError, UnrecoverableError}, key=lambda kind: kind.code):
        also = [base.__name__ for base in kind.__mro__ if base in (ValueError, TypeError)] or ["-"]
        first_line = (inspect.getdoc(kind) or "").splitlines()[0].replace("|", "\\|")
        rows.append(f"| `{kind.__name__}` | {kind.code} | {', '.join(also)} | {first_line} |")
    return "\n".join(rows)


def reasons_table() -> str:
    """Return a table of the reasons for dead letters."""
    meaning = {
        tampu.DlqReason.RETRIES_EXHAUSTED: "the job used up its attempts, or crashed its worker too often",
        tampu.DlqReason.DECODE_FAILED: "the envelope, payload or arguments cannot be decoded, or do not match the type",
        tampu.DlqReason.MALFORMED: "the entry has no payload field; all its fields are kept in the dead letter",
        tampu.DlqReason.OVERSIZE_PAYLOAD: "the envelope is larger than `max_payload_bytes`",
        tampu.DlqReason.UNRECOVERABLE: "the handler raised `UnrecoverableError` or returned `Cancel`, no worker has a "
        "task with the job's name, or the task's retry rules gave up",
        tampu.DlqReason.EXPIRED: "the job had not started when it expired (`task.using(expires=...)`)",
    }
    rows = [f"| `{reason}` | {reason.code} | {meaning[reason]} |" for reason in tampu.DlqReason]
    return "\n".join(["| reason | code | when |", "|---|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {
    "ProducerConfig": lambda: settings_table(config.ProducerConfig, config),
    "ConsumerConfig": lambda: settings_table(config.ConsumerConfig, config),
    "PromoterConfig": lambda: settings_table(config.PromoterConfig, config),
    "SchedulerConfig": lambda: settings_table(config.SchedulerConfig, config),
    "RetryConfig": retry_table,
    "errors": errors_table,
    "reasons": reasons_table,
}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def updated(text: str) -> str:
    """Return the page with its tables replaced."""
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main(arguments: list[str]) -> int:
    stale = []
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text()
        new = updated(text)
        if new != text:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(new)
    if "--check" in arguments and stale:
        print(f"not up to date: {', '.join(stale)}; run python scripts/make_reference.py")
        return 1
    print(f"written: {', '.join(stale)}" if stale else "all tables are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
