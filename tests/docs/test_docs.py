"""The docs are correct: their code runs, their links work, their tables match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from docs.doc_pages import DOCS, PageRun, fits, has_code

if TYPE_CHECKING:
    from pathlib import Path

    from servers.process import Server

#: The pages whose code is run; the others have their own tests.
PAGES = [
    DOCS.parent / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if page.name not in ("architecture.md", "rsmq.md", "spark.md")),
]


@pytest.mark.parametrize("page", [*filter(has_code, PAGES)], ids=lambda page: str(page.relative_to(DOCS.parent)))
async def test_the_code_of_a_page_runs(
    server: Server, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAMPU_URL", server.url)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name in ("app", "tasks")]:
        monkeypatch.delitem(sys.modules, name)
    await PageRun(page, tmp_path, server.url).run()


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "examples" / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"[\w/-]+\.md", (DOCS.parent / "mkdocs.yml").read_text())
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - set(listed) == set()


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "SECURITY.md"], ids=lambda page: page.name)
def test_no_page_grants_whole_categories_of_commands(page: Path) -> None:
    """They include FLUSHALL and CLIENT KILL; `tampu acl` prints the commands of each role."""
    assert "+@" not in page.read_text()


def test_the_reference_is_up_to_date() -> None:
    script = DOCS.parent / "scripts" / "make_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_outdated_reference_is_detected(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS.parent / "scripts"))
    try:
        import make_reference
    finally:
        sys.path.pop(0)
    page = (DOCS / "reference" / "configuration.md").read_text()
    assert make_reference.updated(page) == page
    assert make_reference.updated(page.replace("| `ack_batch` | `256` |", "| `ack_batch` | `7` |")) == page


@pytest.mark.parametrize(
    ("expected", "output", "fit"),
    [
        ("a\n...\nc", "a\nb\nb\nc\n", True),
        ("a ... c", "a b c", True),
        ("a", "a\nb", False),
        ("...", "", True),
        ("a.c", "abc", False),
    ],
)
def test_dots_stand_for_anything(expected: str, output: str, fit: bool) -> None:
    assert fits(expected, output) is fit


def test_the_comparison_has_a_row_for_every_peer() -> None:
    page = (DOCS / "explanation" / "comparison.md").read_text()
    peers = "chasquimq Celery Dramatiq RQ arq SAQ streaQ taskiq BullMQ RSMQ".split()
    assert [peer for peer in peers if f"| **{peer}**" not in page] == []
