"""A worker's probes while those who ask come and go."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.waiting import wait_for

from tandem.worker import probes
from tandem.worker.handoff import NoHandoff
from tandem.worker.probes import ProbeServer, ProbeState
from tandem.worker.server_config import ServerConfig
from tandem.worker.worker_probes import WorkerProbes

if TYPE_CHECKING:
    from tandem.engine.core.engine_core import EngineCore

RESET_AT_CLOSE = struct.pack("ii", 1, 0)


def test_one_who_gives_up_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    """A busy start answers late, and whoever started the worker asks again meanwhile."""
    gone, asked = threading.Event(), threading.Event()

    def ready() -> str | None:
        asked.set()
        assert gone.wait(5)
        return None

    state = ProbeState(health=lambda: None, ready=ready, debug=dict, registry=CollectorRegistry())
    server = ProbeServer("127.0.0.1", 0, state)
    server.start()
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", server.port)) as hasty:
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        hasty.sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n")
        assert asked.wait(5)
    gone.set()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5) as answer:
        assert answer.status == 200
    wait_for(lambda: threading.active_count() <= before)
    server.stop()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server looks every second")
def test_a_worker_that_ends_does_not_wait_for_its_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is woken, however seldom it looks by itself."""
    monkeypatch.setattr(probes, "POLL_SECONDS", 3600.0)
    state = ProbeState(
        health=lambda: None, ready=lambda: None, debug=dict, registry=CollectorRegistry()
    )
    server = ProbeServer("127.0.0.1", 0, state)
    server.start()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5) as answer:
        assert answer.status == 200
    ending = threading.Thread(target=server.stop, daemon=True)
    ending.start()
    wait_for(lambda: not ending.is_alive())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_connections_that_ask_nothing_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They take no more than so many threads, and the oldest makes room for who comes."""
    monkeypatch.setattr(probes, "MAX_CONNECTIONS", 4)
    state = ProbeState(
        health=lambda: None, ready=lambda: None, debug=dict, registry=CollectorRegistry()
    )
    server = ProbeServer("127.0.0.1", 0, state)
    before = threading.active_count()
    server.start()
    address = ("127.0.0.1", server.port)
    idle = [socket.create_connection(address, timeout=5) for _ in range(20)]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5) as answer:
            assert answer.status == 200
        assert idle[0].recv(1) == b""
        wait_for(lambda: threading.active_count() <= before + 1 + 4)
        idle[-1].sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.0 200"
    finally:
        for each in idle:
            each.close()
        server.stop()
    assert "Traceback" not in capfd.readouterr().err


class _Handoff(NoHandoff):
    """One that says what a test says."""

    why: str | None = None
    for_good = False

    def problem(self) -> str | None:
        return self.why

    def ended(self) -> str | None:
        return self.why if self.for_good else None


@pytest.mark.parametrize("for_good", [False, True])
def test_a_hand_off_that_has_ended_for_good_fails_liveness_and_one_that_may_heal_does_not(
    for_good: bool,
) -> None:
    """Who is not ready gets no requests for a while; only another process has a new hand-off."""
    server = ServerConfig(host="127.0.0.1", port=0, probe_port=0)
    asked, handoff = WorkerProbes(server, CollectorRegistry()), _Handoff()

    def answers(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{asked.port}{path}", timeout=5) as said:
                return str(said.status)
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()}"

    try:
        assert answers("/health") == "200"
        core = cast("EngineCore", None)  # which only /debug asks
        asked.attach(core=core, handoff=handoff, draining=lambda: False)
        handoff.why, handoff.for_good = "slots wait", for_good
        ready = answers("/ready")
        assert (ready[:3], "slots wait" in ready) == ("503", True)
        health = answers("/health")
        assert (health[:3], "slots wait" in health) == ("503" if for_good else "200", for_good)
    finally:
        asked.close()
