"""Look at the built documentation in a browser: ``python -m tests.screens.site`` after `make docs`.

Fails if a page asks another host for anything, if a script fails, if a diagram is not drawn, or if
the search finds nothing. Writes the picture of the landing page.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.screens.chromium import Page, browser

SITE = Path(__file__).parents[2] / "site"
MOST_BYTES = 300_000
STILL = "<style>* { transition: none !important }</style>"
"""Tabs fade in, and a headless browser draws no frames between."""


class Handler(SimpleHTTPRequestHandler):
    """Files of the site, without a log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of the loopback; yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main() -> int:
    """Check the pages and write their pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.screens.site", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/screens"), help="of the picture")
    parser.add_argument("--pages", nargs="*", default=(), help="further pages to take, in --out")
    options = parser.parse_args()
    with served(SITE) as url, browser() as page:
        look(page, url)
        picture(page, f"{url}/index.html", options.out / "docs-site.png")
        for name in options.pages:
            picture(page, f"{url}/{name}", options.out / f"{Path(name).stem}.png")
        foreign = [each for each in page.requested if not each.startswith((url, "data:", "blob:"))]
        problems = [*foreign, *page.complaints]
    print("\n".join(problems) or "no request to another host, no failed script")
    return int(bool(problems) or (options.out / "docs-site.png").stat().st_size > MOST_BYTES)


def look(page: Page, url: str) -> None:
    """Wait for a diagram of the architecture and for a result of the search."""
    page.open(f"{url}/architecture.html")
    page.wait_for("document.querySelectorAll('div.mermaid').length > 0")
    page.open(f"{url}/index.html")
    page.run("document.querySelector('.md-search__input').focus()")
    page.run(
        "(i => { i.value = 'quarantine'; i.dispatchEvent(new Event('keyup', {bubbles: true})) })"
        "(document.querySelector('.md-search__input'))"
    )
    page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")


def picture(page: Page, address: str, path: Path) -> None:
    """Take a page in light colours as a desktop shows it."""
    page.prefer("light")
    page.size(1280, 900)
    page.open(address)
    page.wait_for("document.fonts.status === 'loaded'")
    page.run(f"document.head.insertAdjacentHTML('beforeend', {STILL!r})")
    page.screenshot(path)


if __name__ == "__main__":
    sys.exit(main())
