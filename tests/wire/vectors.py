"""Load `tests/vectors` as parameters of tests, marked so that `conftest.py` can count them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection

FOLDER = Path(__file__).parent.parent / "vectors"


@cache
def load(file: str) -> Any:
    return json.loads((FOLDER / file).read_text())


def vectors(file: str, group: str | None = None, *, only: Collection[str] = (), but: Collection[str] = ()) -> list[Any]:
    """Return the vectors of one group of a file as parameters: `only` those named, or all `but` those named.

    `only` is for vectors that tampu does not follow; they are counted as excepted.
    """
    items = load(file) if group is None else load(file)[group]
    label = file.removesuffix(".json") if group is None else f"{file.removesuffix('.json')}: {group}"
    parameters = []
    for number, item in enumerate(items):
        name = str(item.get("name") or item.get("from") or item.get("python_repr") or item.get("ulid") or "")
        if name in but or (only and name not in only):
            continue
        mark = pytest.mark.vector(label, number, excepted=bool(only))
        parameters.append(pytest.param(item, id=f"{number}-{name}", marks=mark))
    return parameters


def unhex(texts: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]
