"""mkdocs hooks: pages of the site that are made from files outside docs/, and the links that point to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Where each file outside docs/ is on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if source.startswith("examples/"):
            text += "".join(_example(path) for path in sorted((ROOT / "examples").glob("*.py")))
        files.append(File.generated(config, page, content=text))
    return files


def _example(path: Path) -> str:
    return f"\n## {path.name}\n\n```python\n{path.read_text()}```\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages made above."""
    here = page.file.src_uri
    source = next((file for file, made in PAGES.items() if made == here), f"docs/{here}")

    def on_the_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
        if target.startswith("docs/") and not source.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target in PAGES:
            target = PAGES[target]
        elif target.startswith("examples/"):
            heading = posixpath.basename(target).replace(".", "")
            return f"{posixpath.relpath('examples.md', posixpath.dirname(here) or '.')}#{heading}"
        else:
            return link[0]
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (link["anchor"] or "")

    return _LINK.sub(on_the_site, markdown)
