"""A griffe extension for the API reference: `#:` comments above attributes are their documentation."""

from __future__ import annotations

from typing import Any

import griffe


class CommentsAsDocstrings(griffe.Extension):
    """Read the `#:` lines above an attribute that has no docstring."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.lineno is None or attr.is_alias:
            return
        lines = attr.lines_collection[attr.filepath]  # type: ignore[index]  # a module has one file
        comment: list[str] = []
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            comment.insert(0, line.strip().removeprefix("#:").strip())
        if comment:
            attr.docstring = griffe.Docstring("\n".join(comment), parent=attr)
