"""`docs/architecture.md` names every top-level folder and module, and no path that does not exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "src" / "tampu"
PAGE = (PROJECT / "docs" / "architecture.md").read_text()


def named_in_the_table() -> list[set[str]]:
    """Return the paths of each row of the first table."""
    table = PAGE.split("## Folders", 1)[1].split("\n## ", 1)[0]
    return [
        set(re.findall(r"`(\w+(?:/|\.py))`", row.split("|")[1])) for row in table.splitlines() if row.startswith("| `")
    ]


def test_the_table_lists_every_folder_and_module() -> None:
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    listed = set().union(*named_in_the_table())
    assert listed == folders | modules


def test_its_rows_are_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]]
    rows = [{path.strip("/").removesuffix(".py") for path in row} for row in named_in_the_table()]
    assert rows == layers


def test_every_path_it_names_exists() -> None:
    paths = set(re.findall(r"`((?:\w+/)+[\w*.]*|\w+\.(?:py|lua))`", PAGE))
    assert len(paths) > 50
    for path in paths:
        places = (PACKAGE, PROJECT, PACKAGE / "redis" / "lua")
        assert any(list(place.glob(path)) for place in places), path


def test_there_are_few_top_level_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 16
