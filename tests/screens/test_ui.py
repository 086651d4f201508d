"""`/ui` in a browser, over real workers under a little load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stack import Stack
from tests.screens.chromium import NAMES, Page, browser, find_chromium
from tests.screens.load import loaded

KEY = "the-key-of-this-test"
WHOLE = (
    "[...document.querySelectorAll('#calls .row')]"
    ".filter(e => e.querySelector('.status.good') && e.innerText.includes('→ 300'))"
)
"""Rows of requests that came to their end, the latest first."""
needs_browser = pytest.mark.skipif(
    find_chromium() is None, reason=f"no browser is here: none of {', '.join(NAMES)}"
)
pytestmark = [needs_browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def stack(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker, and a router that asks for a key."""
    log = tmp_path_factory.mktemp("ui") / "stack.log"
    flags = ["--api-key", KEY]
    with Stack.running(str(small), log, router_flags=flags) as stack:
        yield stack


@pytest.fixture
def page() -> Iterator[Page]:
    """A browser of its own for each test: no key is left of another one."""
    with browser() as page:
        page.size(1360, 900)
        yield page


def enter(page: Page, stack: Stack, key: str = KEY) -> None:
    """Open the page, and give it a key."""
    page.open(f"{stack.url}/ui")
    page.wait_for("!document.getElementById('key-form').hidden")
    page.run(f"document.getElementById('key').value = {json.dumps(key)}")
    page.run("document.getElementById('key-form').requestSubmit()")


@pytest.mark.nightly
def test_it_asks_for_the_key_and_keeps_it_in_the_tab(stack: Stack, page: Page) -> None:
    """A wrong one is refused in words; the right one lasts over a reload and no longer."""
    enter(page, stack, "wrong")
    page.wait_for("document.getElementById('key-error').textContent.includes('does not take')")
    assert page.run("document.getElementById('main').hidden")
    enter_again = f"document.getElementById('key').value = {json.dumps(KEY)}"
    page.run(enter_again)
    page.run("document.getElementById('key-form').requestSubmit()")
    page.wait_for("document.getElementById('state').textContent === 'live'")
    assert KEY not in page.run("document.documentElement.outerHTML")
    page.open(f"{stack.url}/ui")
    page.wait_for("document.getElementById('state').textContent === 'live'")
    page.run("document.getElementById('change-key').click()")
    assert page.run("sessionStorage.length") == 0
    assert page.run("document.getElementById('main').hidden")


def test_it_draws_the_fleet_and_its_requests(stack: Stack, page: Page) -> None:
    """A box for each worker, a link with its transport, dots that move, bars; nothing is asked of
    anybody else, and no script fails."""
    enter(page, stack)
    page.wait_for("document.querySelectorAll('#fleet .box').length === 3")
    roles = page.run("[...document.querySelectorAll('#fleet .box')].map(e => e.classList[1])")
    assert roles == ["router", "prefill", "decode"]
    assert page.run("document.querySelectorAll('#fleet .way.kv.up').length") == 1
    with loaded(stack.url, clients=2, key=KEY, max_tokens=300):
        page.wait_for("document.querySelectorAll('#fleet .dot.tokens').length > 0")
        page.wait_for("document.querySelectorAll('#fleet .dot.kv').length > 0")
        where = "document.querySelector('#fleet .dot.tokens').getAttribute('cx')"
        before = page.run(where)
        page.wait_for(f"{where} !== {json.dumps(before)}")
        page.wait_for("Number(document.querySelector('#rates b').textContent) > 0")
        page.wait_for("document.querySelector('#phases .some') !== null")
        page.wait_for(f"{WHOLE}.length >= 2", 60)
    owners = "[...document.querySelectorAll('#calls .row .bar .owner')].map(e => e.classList[1])"
    assert {"router", "prefill", "decode"} <= set(page.run(owners))
    page.run(f"{WHOLE}.at(-1).click()")
    page.wait_for("document.querySelectorAll('#call .part').length >= 2")
    text = page.run("document.getElementById('call').innerText")
    for words in ("prefill: chunk", "decode: decode", "first token after", "GB/s", "→"):
        assert words in text
    assert page.run("document.querySelectorAll('#links tbody tr').length") == 1
    assert page.requested
    outside = [each for each in page.requested if not each.startswith((stack.url, "about:"))]
    assert not outside
    assert not [each for each in page.complaints if "401" not in each]


@pytest.mark.nightly
def test_it_chats(stack: Stack, page: Page) -> None:
    """Streamed, with the conversation, and shown as text whatever the words are."""
    enter(page, stack)
    page.wait_for("document.getElementById('state').textContent === 'live'")
    page.run("document.getElementById('max-tokens').value = 12")
    for turn, words in enumerate(("Name a river. <img src=x onerror=alert(1)>", "And another?")):
        page.run(f"document.getElementById('words').value = {json.dumps(words)}")
        page.run("document.getElementById('chat-form').requestSubmit()")
        done = f"document.querySelectorAll('#messages .note .plain').length === {turn + 1}"
        page.wait_for(done, 60)
    said = page.run("[...document.querySelectorAll('.message')].map(e => e.textContent)")
    assert len(said) == 4
    assert said[0] == "Name a river. <img src=x onerror=alert(1)>"
    assert all(said[index].strip() for index in (1, 3))
    assert page.run("document.querySelectorAll('#messages img').length") == 0
    page.run("document.querySelector('#messages .note .plain').click()")
    page.wait_for("document.querySelectorAll('#call .part').length >= 2")


@pytest.mark.nightly
def test_it_says_that_the_router_is_gone(small: Path, tmp_path: Path, page: Page) -> None:
    with Stack.running(str(small), tmp_path / "log", prefill=0) as alone:
        page.open(f"{alone.url}/ui")
        page.wait_for("document.querySelectorAll('#fleet .box.decode').length === 1")
    page.wait_for("document.getElementById('state').classList.contains('lost')")
    assert page.run("document.querySelectorAll('#fleet .box').length") == 2


@pytest.mark.nightly
def test_light_and_dark_follow_the_system_or_the_button(stack: Stack, page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    page.open(f"{stack.url}/ui")
    light = page.run(colour)
    page.prefer("dark")
    dark = page.run(colour)
    assert light != dark
    page.run("document.getElementById('theme').click()")
    assert page.run(colour) == light
    page.run("document.getElementById('theme').click()")
    assert page.run(colour) == dark


def test_the_page_alone_is_open(stack: Stack) -> None:
    """Its files hold nothing; everything that tells of the service asks for the key."""
    assert httpx.get(f"{stack.url}/ui").status_code == 200
    assert httpx.get(f"{stack.url}/ui/none.js").status_code == 401
    assert httpx.get(f"{stack.url}/debug/fleet").status_code == 401
