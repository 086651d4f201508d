"""Links of README.md and docs/ lead somewhere, and the site has every page."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)")
_TITLE = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)


def text_of(page: Path) -> str:
    return _CODE.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's titles, by GitHub's rule."""
    titles = _TITLE.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in titles)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    broken = []
    for link in _LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_begin_after_an_empty_line(page: Path) -> None:
    """Markdown of the site joins them to the paragraph otherwise."""
    lines = text_of(page).splitlines()
    joined = [
        f"{number}: {line}"
        for number, (before, line) in enumerate(itertools.pairwise(lines), 2)
        if re.match(r"- |\* |1\. |\| ", line)
        and before.strip()
        and not re.match(r"\s*[-*|#]|\s*\d+\. |\s{2,}", before)
    ]
    assert joined == []


def test_the_navigation_names_pages_that_exist_and_omits_none() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r"([\w/-]+(?:\.md|/))$", navigation, re.MULTILINE))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    folders = {name for name in named if name.endswith("/")}

    assert [name for name in named - folders if name not in pages] == []
    left = {name for name in pages - named if f"{name.rpartition('/')[0]}/" not in folders}
    assert left == set()


_OTHERS = frozenset({
    *("cascade", "convert", "delete-emptydir-data", "recursive", "reset-then-reuse-values"),
    *("reset-values", "reuse-values", "runner", "set", "take-ownership"),
})  # fmt: skip
"""Flags of kubectl, Helm and vLLM that pages name."""


def known_flags() -> set[str]:
    """Return the flags of all commands: those with settings, and literals in the sources."""
    known = set(re.findall(r"`--([a-z0-9-]+)`", (DOCS / "reference" / "flags.md").read_text()))
    for folder in ("bench", "cli", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"--([a-z0-9-]+)"', path.read_text()))
    return known | {f"no-{name}" for name in known} | _OTHERS


def test_flags_that_pages_name_exist() -> None:
    """A flag that was removed or renamed is not documented any more."""
    known = known_flags()
    unknown = {
        f"{page.name}: --{name}"
        for page in PAGES
        for code in re.findall(r"`([^`\n]+)`", page.read_text())
        for name in re.findall(r"(?<![\w-])--(?:\w+\.)?([a-z][a-z0-9-]+)(?![\w.-])", code)
        if name not in known
    }
    assert unknown == set()
