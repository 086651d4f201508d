"""Hooks of the documentation site, which mkdocs calls while `make docs` builds it.

Pages are written for a reader of the repository. So links out of docs/ become links to the
repository, marks after the language of a block of code go, and folders of the navigation are
listed. Mermaid is served from the site: the Makefile unpacks it into .tools/docs-assets.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / ".tools" / "docs-assets" / "sources"
MERMAID = ROOT / ".tools" / "docs-assets" / "package" / "dist" / "mermaid.min.js"
_FENCE = re.compile(r"^(```\w+) [\w-]+$", re.MULTILINE)
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)\s]*)")


def on_startup(**_: Any) -> None:
    """Link the parts of ``tandem`` into one package: griffe reads one folder of a namespace."""
    (SOURCES / "tandem").mkdir(parents=True, exist_ok=True)
    for package in ROOT.glob("*/tandem/*/__init__.py"):
        link = SOURCES / "tandem" / package.parent.name
        if not link.is_symlink():
            link.symlink_to(package.parent)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of each folder that the navigation names."""
    config.nav = listed(config.nav, Path(config.docs_dir))
    return config


def listed(nav: Any, docs: Path) -> Any:
    """Return a navigation in which a folder is the list of its pages, README first."""
    if isinstance(nav, list):
        return [listed(each, docs) for each in nav]
    if isinstance(nav, dict):
        return {title: listed(each, docs) for title, each in nav.items()}
    if not nav.endswith("/"):
        return nav
    pages = sorted((docs / nav).glob("*.md"), key=lambda path: (path.stem != "README", path.stem))
    return [f"{nav}{path.name}" for path in pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add Mermaid, which draws the diagrams in the browser."""
    from mkdocs.structure.files import File

    script = MERMAID.read_bytes()
    files.append(File.generated(config, "assets/mermaid.min.js", content=script))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links out of docs/ lead to the repository."""
    base = f"{config.extra['repository']}/blob/main/"
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        return found[0] if target.startswith("docs/") else f"]({base}{target}"

    return _OUTSIDE.sub(link, _FENCE.sub(r"\1", markdown))
