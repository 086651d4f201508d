"""Hooks of the documentation site, and the word list of its pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import site, words


def test_a_folder_of_the_navigation_is_its_pages(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for name in ("b.md", "a.md", "README.md", "x.png"):
        (tmp_path / "notes" / name).touch()
    nav = [{"Home": "index.md"}, {"Notes": "notes/"}]

    listed = [f"notes/{name}.md" for name in ("README", "a", "b")]
    assert site.listed(nav, tmp_path) == [{"Home": "index.md"}, {"Notes": listed}]


def test_links_out_of_docs_lead_to_the_repository() -> None:
    config: Any = SimpleNamespace(extra={"repository": "https://example.org/r"})
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="runbooks/A.md"))
    files: Any = None
    text = "[a](../http.md#errors) [b](../../bench/x.md 'title')\n```sh not-run\nls\n```\n"

    assert site.on_page_markdown(text, page, config, files) == (
        "[a](../http.md#errors) [b](https://example.org/r/blob/main/bench/x.md 'title')\n"
        "```sh\nls\n```\n"
    )


def test_words_of_code_and_links_do_not_count(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It says `says` [so](says.md).\n```\nsays\n```\nWhoever tells.\n")
    text = words.prose(page)
    root = words.ROOT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "ROOT", tmp_path)
        assert list(words.places(page, text, "say")) == ["page.md:1: says", "page.md:5: tells"]
        assert list(words.places(page, text, "persons")) == ["page.md:5: Whoever"]
    assert words.pages()[0] == root / "README.md"
