"""`make screens`: pictures of `tandem top`, `tandem explain` and `/ui` over a stack under load."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from tests.screens.chromium import Page, browser
from tests.screens.load import loaded

from tandem.hub import DEFAULT_MODEL, prepare

COLUMNS = 132
WARM_SECONDS = 12.0
ENOUGH = 40
"""Tokens of an answer that is worth a look."""
MOST_BYTES = 300_000
THEME = TerminalTheme(
    (14, 20, 32),
    (223, 230, 242),
    [
        *((40, 48, 66), (229, 108, 117), (79, 196, 143), (231, 174, 72)),
        *((106, 165, 245), (176, 142, 240), (86, 200, 216), (223, 230, 242)),
    ],
)
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #0e1420; }}
pre {{ display: inline-block; margin: 0; padding: 18px 22px; color: #dfe6f2;
  background: #0e1420; font: 13px/1.35 "DejaVu Sans Mono", monospace; }}
.prompt {{ color: #7fd5a7; }}
</style><pre><span class="prompt">$ COMMAND</span>
{code}</pre>"""


def main() -> int:
    """Write them; 1 if one is too large to keep."""
    parser = argparse.ArgumentParser(prog="python -m tests.screens", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/screens"), help="folder to write to")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--clients", type=int, default=5, help="clients that ask at once")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the stack
    from stack import Stack

    options.out.mkdir(parents=True, exist_ok=True)
    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack.running(
            model,
            Path(folder) / "stack.log",
            prefill=options.prefill,
            decode=options.decode,
            worker_flags=["--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "400"],
        )
        with stack as running, browser() as page:
            _take(running.url, page, options.out, options.clients)
    sizes = {each.name: each.stat().st_size for each in sorted(options.out.glob("*.png"))}
    for name, size in sizes.items():
        print(f"{options.out / name}: {size / 1000:.0f} kB")
    return int(any(size > MOST_BYTES for size in sizes.values()))


def _take(url: str, page: Page, out: Path, clients: int) -> None:
    with loaded(url, clients=clients):
        _open_ui(url, page)
        _chat(page)
        _screen(page, out, "ui-light.png", "light")
        name = _calls(url)[0]["request_id"][:8]
        rows = "[...document.querySelectorAll('#calls .row')]"
        page.run(f"{rows}.find(e => e.innerText.includes('{name}')).click()")
        page.wait_for("document.querySelectorAll('#call .part').length >= 2")
        page.run("document.getElementById('links-box').open = true")
        _screen(page, out, "ui-dark.png", "dark")
        _terminal(page, out / "top.png", url, "top", "--once")
        longest = _calls(url)[0]["request_id"]
        _terminal(page, out / "explain.png", url, "explain", longest, "--width", str(COLUMNS))


def _calls(url: str) -> list[dict[str, Any]]:
    """Of the last calls, those that came to their end, the longest prompts first."""
    kept = httpx.get(f"{url}/debug/requests?limit=16").json()["requests"]
    whole = [each for each in kept if not each["running"] and each["num_tokens"] > ENOUGH]
    return sorted(whole, key=lambda each: -each["num_prompt_tokens"])


def _open_ui(url: str, page: Page) -> None:
    page.size(1280, 1240)
    page.open(f"{url}/ui")
    page.wait_for("document.querySelectorAll('#calls .row .status.good').length > 8", 120)
    time.sleep(WARM_SECONDS)


def _chat(page: Page) -> None:
    """A question with its answer, and one call with all its parts."""
    page.run("document.getElementById('max-tokens').value = 48")
    page.run("document.getElementById('temperature').value = 0")
    page.run("document.getElementById('words').value = 'What is the capital of France?'")
    page.run("document.getElementById('chat-form').requestSubmit()")
    page.wait_for("document.querySelectorAll('#messages .note .plain').length === 1", 120)


def _screen(page: Page, out: Path, name: str, scheme: str) -> None:
    page.prefer(scheme)
    page.size(1280, 600)
    page.size(1280, page.run("document.body.scrollHeight"))
    time.sleep(1.5)
    page.screenshot(out / name)


def _terminal(page: Page, path: Path, url: str, *words: str) -> None:
    """What a command prints, colours and all, as a picture of a terminal."""
    environ = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "tandem.cli", *words, "--url", url]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    console = Console(record=True, width=COLUMNS + 8, file=StringIO())
    console.print(Text.from_ansi(ran.stdout.rstrip()), soft_wrap=True)
    shown = escape(" ".join(("tandem", *words)))
    html = console.export_html(
        theme=THEME, inline_styles=True, code_format=_TERMINAL.replace("COMMAND", shown)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "terminal.html"
        file.write_text(html)
        page.prefer("dark")
        page.size(1200, 700)
        page.open(file.as_uri())
        page.screenshot(path, "pre")


if __name__ == "__main__":
    sys.exit(main())
