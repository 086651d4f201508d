"""`tandem top` over a real router, and its drawing over answers of many kinds."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.cli import __main__ as main
from tandem.cli.inspect import top
from tandem.cli.inspect.top import WIDTH, Frame, bar_of, drawn
from tandem.protocol.errors import InvalidParameter

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
BODY: Any = {"model": "fake", "prompt": "word " * 60, "max_tokens": 4}


def worker(role: str, number: int, **said: Any) -> dict[str, Any]:
    """One worker, as the router tells of it."""
    return {
        "name": f"{role} {number}",
        "role": role,
        "endpoint": f"10.0.0.{number}:8001",
        "pod": "",
        "incarnation": f"{role}-{number}",
        "model": "m",
        "health": "up",
        "running": 1,
        "max_running": 8,
        "waiting": 0,
        "kv_use": 0.5,
        "steps_per_s": 10.0,
        "prompt_tokens_per_s": None,
        "generated_tokens_per_s": 1234.0,
        "heard_ms_ago": 300,
        **said,
    }


def link(prefill: int, decode: int, **said: Any) -> dict[str, Any]:
    """One link, as the router tells of it."""
    return {
        "prefill": f"prefill-{prefill}",
        "decode": f"decode-{decode}",
        "state": "up",
        "reason": "",
        "transport": "tcp",
        "gb_per_s": 1.5,
        "waiting_bytes": 3_000_000,
        "underway": 2,
        "handoffs": 40,
        "failed": 0,
        "handoffs_per_s": 3.0,
        **said,
    }


def call(**said: Any) -> dict[str, Any]:
    """One call, as the router tells of it."""
    return {
        "request_id": "0123456789abcdef",
        "path": "/v1/chat/completions",
        "status": 200,
        "running": False,
        "total_ms": 100.0,
        "first_token_ms": 25.0,
        "num_prompt_tokens": 60,
        "num_tokens": 8,
        "parts": [["prefill", "chunk", 0.0, 25.0], ["decode", "decode", 25.0, 75.0]],
        **said,
    }


def fleet(workers: list[Any], handoff_links: list[Any], **said: Any) -> dict[str, Any]:
    return {
        "workers": workers,
        "handoff_links": handoff_links,
        "handoff_links_left_out": 0,
        "links": {},
        "underway": {"admission": 2, "no_worker": 0, "decode": 1},
        "queue": {
            "running": 1,
            "max_running": 4,
            "waiting": 2,
            "max_waiting": 9,
            "oldest_wait_s": 1.25,
            "rejected": {"max_queue_age": 3},
        },
        "rates": {"window_s": 0.0},
        **said,
    }


def text_of(frame: Frame, height: int | None = None) -> str:
    console = Console(width=160, height=height, file=io.StringIO())
    with console.capture() as captured:
        console.print(drawn(frame, height))
    return captured.get()


def test_a_frame_names_what_is_wrong_first() -> None:
    """Bad links before busy ones; reasons, refusals and addresses without a worker are there."""
    workers = [worker("decode", 1, health="suspect", kv_use=0.97), worker("prefill", 2, pod="p-0")]
    links = [
        link(2, 1, handoffs_per_s=50.0),
        link(2, 3, state="quarantined", reason="digest", failed=7, transport=None),
    ]
    said = fleet(workers, links, links={"10.0.0.9:1": "greeting", "10.0.0.1:8001": "up"})
    text = text_of(Frame("http://r", "12:00:00", said, [call(), call(running=True, status=None)]))
    assert text.index("quarantined: digest") < text.index("p-0 → 10.0.0.1:8001")
    for words in (
        "1 prefill, 1 decode",
        "rates: not known yet",
        "suspect",
        "97%",
        "1,234",
        "1.50",
        "3.0 MB",
        "router's queue 2",
        "2 of 9 wait, the oldest for 1.2 s",
        "refused: 3 by max_queue_age",
        "no worker answers at 10.0.0.9:1 (greeting)",
        "chat/completions 01234567",
        "runs",
    ):
        assert words in text, words
    assert "10.0.0.1:8001 (up)" not in text


def test_a_frame_fits_the_terminal_however_many_there_are() -> None:
    """Rows that find no room are counted, none of the tables is left out."""
    workers = [worker("decode", number) for number in range(100)]
    links = [link(number, number) for number in range(400)]
    said = fleet(workers, links, handoff_links_left_out=50)
    frame = Frame("http://r", "12:00:00", said, [call()] * 12)
    text = text_of(frame, 50)
    assert len(text.rstrip().splitlines()) <= 50
    assert text.count("more") == 2
    assert "chat/completions" in text
    whole = text_of(frame)
    assert whole.count("decode 10.0.0.") == 100
    assert "… 50 more" in whole


def test_a_router_without_workers_is_drawn() -> None:
    text = text_of(Frame("http://r", "12:00:00", fleet([], []), []))
    assert "no model yet  0 prefill, 0 decode" in text
    unheard = worker("decode", 1, kv_use=None, heard_ms_ago=None, steps_per_s=None)
    assert "decode 10.0.0.1:8001" in text_of(Frame("r", "", fleet([unheard], []), []))


def test_rates_and_failures_are_said() -> None:
    """Means that are not known are left out."""
    rates = {
        "window_s": 5.0,
        "requests_per_s": 2.0,
        "prompt_tokens_per_s": 12000.0,
        "outputs_per_s": 800.0,
        "ttft_ms": 31.0,
        "itl_ms": None,
        "cached_share": 0.25,
        "failed_per_s": 0.5,
    }
    text = text_of(Frame("r", "", fleet([], [], rates=rates), []))
    assert "12,000 prompt tokens/s" in text
    assert "first token 31.0 ms  25% of prompts cached  0.50 failed/s" in text
    assert "between tokens" not in text


def test_a_bar_shows_who_had_the_call() -> None:
    """Each column is its longest owner's; nobody's time is blank, and no time at all is drawn."""
    bar = bar_of(call())
    assert len(bar) == WIDTH
    styles = [str(span.style) for span in bar.spans]
    assert styles.count("yellow") == WIDTH // 4
    assert styles.count("green") == WIDTH - WIDTH // 4
    assert bar_of(call(parts=[])).plain == " " * WIDTH
    assert len(bar_of(call(total_ms=0.0, parts=[["router", "parse", 0.0, 0.0]]))) == WIDTH


def test_one_frame_of_a_router(
    serve: Serve, prefill: Make, decode: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its workers, its link, its calls; or its own words."""
    p, d = prefill(), decode()
    served = serve(p, d, strict_handoff=True, served_model_name=("fake",))
    for _ in range(2):
        assert served.post("/v1/completions", json=BODY).is_success
    assert top.run(["--url", served.url, "--once"]) == 0
    text = capsys.readouterr().out
    for words in (f"prefill {p.endpoint}", f"{p.endpoint} → {d.endpoint}", "completions", "200"):
        assert words in text
    assert top.run(["--url", served.url, "--once", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workers"]) == 2


def test_it_looks_again_until_the_router_is_gone(
    serve: Serve, decode: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it says so in a line, with status 1; or what the router says as it stops, where it looks
    once more in that second."""
    served = serve(decode())
    monkeypatch.setenv("COLUMNS", "120")
    ended: list[int] = []
    words = ["top", "--url", served.url, "--interval", "0.2", "--json"]
    showing = threading.Thread(target=lambda: ended.append(main.main(words)), daemon=True)
    showing.start()
    seen: list[str] = []

    def shown_twice() -> bool:
        seen.append(capsys.readouterr().out)
        return "".join(seen).count("\n") >= 2

    wait_for(shown_twice)
    served.stop()
    showing.join(20)
    assert ended == [1]
    (said,) = capsys.readouterr().err.splitlines()
    gone, stopping = f"no server answers at {served.url}", "[503] The server stops; try again"
    assert said.removeprefix("tandem top: ").startswith((gone, stopping))


def test_in_a_terminal_it_takes_the_screen_and_gives_it_back(serve: Serve, decode: Make) -> None:
    """Ctrl-C is how one leaves: no error."""
    served = serve(decode())
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "tandem.cli", "top", "--url", served.url, "--interval", "0.2"]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    seen = bytearray()
    reading = threading.Thread(target=_read_all, args=(ours, seen), daemon=True)
    reading.start()
    try:
        wait_for(lambda: seen.count(b"tandem top") >= 2, 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        reading.join(5)
        os.close(ours)
    assert seen.count(ENTER_SCREEN) == seen.count(LEAVE_SCREEN) == 1


def _read_all(terminal: int, seen: bytearray) -> None:
    with suppress(OSError):
        while part := os.read(terminal, 65536):
            seen.extend(part)


def test_without_the_key_it_says_so(
    serve: Serve, decode: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and status 1; with the key there is a frame."""
    served = serve(decode(), wait=False, api_key=("secret",))
    served.wait_started()
    assert main.main(["top", "--url", served.url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tandem top: [401] ")
    assert error.count("\n") == 1
    assert main.main(["top", "--url", served.url, "--once", "--api-key", "secret"]) == 0


class _Stranger(BaseHTTPRequestHandler):
    body = b"<html>"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(params=[b"<html>", b"[]"])
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of one that answers so."""
    handler = type("Handler", (_Stranger,), {"body": request.param})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_who_is_no_router_is_named(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", stranger, "--once"]) == 1
    assert "does not answer as a router does" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "0.1", "-1", "nan", "inf", "1e9"])
def test_an_interval_has_bounds(interval: str) -> None:
    with pytest.raises(InvalidParameter, match="--interval"):
        top.run(["--interval", interval, "--once"])


def test_a_key_that_cannot_be_sent_is_not_shown() -> None:
    """Nor a URL that is none taken."""
    with pytest.raises(InvalidParameter, match="not shown"):
        top.run(["--api-key", "naïve", "--once"])
    with pytest.raises(InvalidParameter, match="--url"):
        top.run(["--url", "nowhere", "--once"])
