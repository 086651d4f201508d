"""Routers whose answers break off or make no sense: there is a verdict, and another question."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue

import msgspec
import pytest
from tests.operator.test_judging import question

from tandem.operator.api.status import Links, Reason
from tandem.operator.probes.canary import ask
from tandem.operator.probes.fleet import read_fleet, read_links
from tandem.operator.probes.probing import Asked, Probes

KEY = ("ns", "demo")
BROKEN_OFF = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n0123456789"
REFUSED_HALF = b"HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\n0123456789"
NO_STATUS = b"no status line\r\n\r\n"


def whole(content: object) -> bytes:
    text = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)


@contextmanager
def router(answer: bytes) -> Iterator[tuple[int, Queue[str]]]:
    """A port that gives the same bytes to whoever asks, and ends; and the paths asked for."""
    asked: Queue[str] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.put(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.wfile.write(answer)
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (BROKEN_OFF, "IncompleteRead"),
        (REFUSED_HALF, "HTTP 500: 0123456789"),
        (NO_STATUS, "no status line"),
        (whole({"choices": 5}), "no answer from"),
        (whole({"choices": [None]}), "no answer from"),
        (whole([1]), "not an object"),
    ],
)
def test_a_canary_that_is_not_answered_says_what_came(answer: bytes, said: str):
    """Whatever a router sends is a verdict."""
    with router(answer) as (port, _):
        verdict = ask(question(port, "r"), 0.0)
    assert verdict.reason is Reason.CANARY_FAILED
    assert said in verdict.message


def test_a_canary_whose_answer_breaks_off_is_asked_again():
    """After its retry the next question goes out."""
    woken: Queue[tuple[str, str]] = Queue()
    probes = Probes(60.0, woken.put)
    with router(BROKEN_OFF) as (port, asked):
        one = question(port, "r")
        probes.poll(KEY, [one], about={"r"}, links=1)
        assert woken.get(timeout=20) == KEY
        assert probes.known(KEY).links is None
        assert [asked.get(timeout=20) for _ in range(2)] == ["/v1/completions", "/debug/fleet"]
        while asked.empty():
            probes.poll(KEY, [one], about={"r"}, links=1)
            time.sleep(0.05)
        assert asked.get(timeout=20) == "/v1/completions"
        assert woken.get(timeout=20) == KEY
    probes.close()


def test_whatever_becomes_of_a_question_another_one_follows():
    """What no clause foresees is a verdict as well, and not one that is asked for ever."""
    woken: Queue[tuple[str, str]] = Queue()
    probes = Probes(60.0, woken.put)
    odd = msgspec.structs.replace(question(1, "r"), base_url="no address")
    probes.poll(KEY, [odd], about={"r"}, links=1)
    assert woken.get(timeout=20) == KEY
    verdict = probes.known(KEY).verdict("r")
    assert verdict is not None
    assert (verdict.reason, "unexpectedly" in verdict.message) == (Reason.CANARY_FAILED, True)
    assert not probes.known(KEY).asked["r"].busy
    probes.close()


def test_links_are_counted_anew_when_workers_come_back():
    """As many as before are other pods, whose links nobody has counted."""
    probes = Probes(60.0, lambda _key: None)
    known = probes.known(KEY)
    known.links = Links(healthy=1, total=1)
    known.asked["r"] = Asked(due=time.monotonic() + 60.0, at=time.monotonic())
    one = question(1, "r")
    assert probes.poll(KEY, [one], about={"r"}, links=1) == pytest.approx(60.0, abs=5.0)
    assert probes.poll(KEY, [], about={"r"}, links=0) is None
    assert known.links == Links(healthy=0, total=0)
    soon = probes.poll(KEY, [one], about={"r"}, links=1)
    assert soon is not None
    assert soon <= 3.0
    probes.close()


@pytest.mark.parametrize("content", [{"workers": 5}, {"workers": [5]}, {"quarantined": [{}]}, [1]])
def test_a_fleet_of_another_shape_is_no_word(content: object):
    """Links are unknown then, as where nothing came."""
    with router(whole(content)) as (port, _):
        assert read_links(f"http://127.0.0.1:{port}", 1, "token") is None


@pytest.mark.parametrize("answer", [BROKEN_OFF, NO_STATUS])
def test_a_fleet_that_breaks_off_is_an_error_of_the_connection(answer: bytes):
    with router(answer) as (port, _), pytest.raises(OSError, match="no complete answer"):
        read_fleet(f"http://127.0.0.1:{port}", "token", 5.0)
