"""The documentation site: the API reference is complete, and the pictures are up to date."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tampu
from tampu import rsmq

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"


def documented(package: str) -> list[str]:
    """Return the names of a package that the API reference documents."""
    pages = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    return re.findall(rf"^::: {package}\.(\w+)$", pages, re.MULTILINE)


def test_the_api_reference_documents_every_public_name_once() -> None:
    assert Counter(documented("tampu")) == Counter(vars(tampu)["__all__"])
    assert Counter(documented(r"tampu\.rsmq")) == Counter(rsmq.__all__)


def script(name: str) -> Any:
    sys.path.insert(0, str(PROJECT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_the_diagram_is_up_to_date() -> None:
    drawing = script("draw_architecture")
    assert drawing.PICTURE.read_text() == drawing.picture(), "run `make diagram`"


def test_the_diagram_names_files_that_exist() -> None:
    drawing = script("draw_architecture")
    named = [path for box in drawing.BOXES for path in box.files]
    named += [path for arrow in drawing.ARROWS for path in re.findall(r"[\w/]+\.py", arrow.label)]
    assert len(named) > 15
    assert [path for path in named if not (PROJECT / "src" / "tampu" / path).exists()] == []


def test_make_docs_fails_on_warnings_such_as_broken_links() -> None:
    [options] = re.findall(r"mkdocs build((?: --\w+)*)", (PROJECT / "Makefile").read_text())
    assert options.split() == ["--strict"]  # with --quiet, warnings are not counted


def test_pages_request_nothing_from_other_hosts() -> None:
    pictures = [path.read_text() for path in DOCS.rglob("*.svg")]
    assert pictures
    links = {link for text in pictures for link in re.findall(r"https?://[^\s\"'<)]+", text)}
    assert links == {"http://www.w3.org/2000/svg"}  # the name of the format
