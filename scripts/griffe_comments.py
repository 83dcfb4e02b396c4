"""A griffe extension for the API reference.

- `#:` comments above attributes are their documentation.
- The fields of settings classes are shown with their defaults, not with the helper calls that check them.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator


class SettingsAsDocumented(griffe.Extension):
    """Complete what griffe reads from the source of an attribute."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        # Here, because griffe makes the signatures of dataclasses in its own on_package, after this one.
        for attr in _attributes_of_classes(pkg):
            if isinstance(attr.value, griffe.ExprCall):
                attr.value = _default(attr) or attr.value

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and (comment := _comment_above(attr, attr.lineno)):
            attr.docstring = griffe.Docstring(comment, parent=attr)


def _attributes_of_classes(scope: griffe.Module | griffe.Class) -> Iterator[griffe.Attribute]:
    for member in scope.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _attributes_of_classes(member)
        elif isinstance(member, griffe.Attribute) and isinstance(scope, griffe.Class) and "dataclass" in scope.labels:
            yield member


def _comment_above(attr: griffe.Attribute, line_number: int) -> str:
    lines = attr.lines_collection[attr.filepath]  # type: ignore[index]  # a module has one file
    comment: list[str] = []
    for line in reversed(lines[: line_number - 1]):
        if not line.strip().startswith("#:"):
            break
        comment.insert(0, line.strip().removeprefix("#:").strip())
    return "\n".join(comment)


def _default(attr: griffe.Attribute) -> str | None:
    """Return the default of a dataclass field as source text, or None if the attribute is something else."""
    kind = getattr(importlib.import_module(attr.module.path), attr.parent.name, None)  # type: ignore[union-attr]
    field = getattr(kind, "__dataclass_fields__", {}).get(attr.name)
    if field is None:
        return None
    if field.default is dataclasses.MISSING:
        return "..."  # each object creates its own
    if isinstance(field.default, int) and not isinstance(field.default, bool):
        return f"{field.default:_}"
    return repr(field.default)
