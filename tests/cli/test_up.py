"""`tandem up` before anything runs: what is wrong is said in a line, at once."""

from __future__ import annotations

import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem.cli.__main__ import main
from tandem.cli.children import Child
from tandem.cli.ports import LOOPBACK, free_ports
from tandem.cli.stack import plan
from tandem.cli.up import Supervisor
from tandem.cli.up_config import UpConfig
from tandem.engine.core.server_config import ServerConfig
from tandem.protocol.child import HEADER_CHILD_TOKEN
from tandem.router.config import RouterConfig

NOWHERE = "/nonexistent/model"
"""Would be complained about, were it looked at."""


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with, at exit status 2."""
    assert main(shlex.split(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    return said.err


def test_a_taken_port_is_found_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]):
    """No minutes of conversion, and no greeting with somebody else's server."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        said = refused(f"up --model {NOWHERE} --port {port}", capsys)
    assert f"port: {port} is not allowed" in said
    assert "another program" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 0", "port: 0 is not allowed; an integer, 1 to 65535"),
        ("--port 70000", "port: 70000 is not allowed"),
        ("--port abc", "--port: 'abc' is not allowed; an integer"),
        ("--port", "--port: a value has to follow"),
        ("--host nonsense.invalid", "host: 'nonsense.invalid'"),
        ("--prefill -1", "prefill: -1 is not allowed; an integer, 0 to 64"),
        ("--log-level loud", "one of debug, info, warning, error"),
        ("--ready-seconds nan", "ready_seconds: nan"),
        ("--modle x", "--modle is no flag of `tandem up`; --model is"),
        ("surplus", "'surplus' is not allowed here"),
        ("--worker-flags --enforce-eagr", "--enforce-eagr is no flag of `tandem prefill`"),
        ("--worker-flags '--max-num-seqs x'", "--max-num-seqs: 'x' is not allowed; an integer"),
        ("--decode-flags '--max-num-seqs -4'", "decode workers: max_num_seqs: -4"),
        ("--prefill-flags '--kv-slot-bytes 1'", "prefill workers: kv_slot_bytes: 1"),
        ("--router-flags '--max-attempts 0'", "flags of the router: max_attempts: 0"),
        ("--router-flags '--api-key \"\"'", "api-key: [''] is not allowed"),
        ("--router-flags '\"'", "No closing quotation"),
        ("--worker-flags '--host 0.0.0.0'", "--allow-plaintext"),
    ],
)
def test_a_wrong_word_is_named_before_the_model_is_looked_at(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """Field, value and what is allowed, without the usage before them."""
    (port,) = free_ports(1)
    own = "" if "--port" in words else f"--port {port}"
    assert said in refused(f"up --model {NOWHERE} {own} {words}", capsys)


def test_flags_for_processes_may_be_given_as_a_word_of_their_own():
    """``--worker-flags "--x"`` means what ``--worker-flags=--x`` means."""
    from tandem.cli.command import parse
    from tandem.cli.flags import Section

    for words in (["--worker-flags", "--enforce-eager"], ["--worker-flags=--enforce-eager"]):
        given = parse("up", "", [Section("Stack", UpConfig)], [*words, "--prefill", "2"])
        assert given[UpConfig] == {"worker_flags": "--enforce-eager", "prefill": 2}


def test_the_end_waits_as_long_as_router_and_workers_drain():
    """The longest drain of the workers counts, and what is given to the router."""
    graces, _ = Supervisor(UpConfig()).check_flags()
    assert (graces.router, graces.workers) == (
        RouterConfig().drain_timeout,
        ServerConfig().drain_seconds,
    )
    given = UpConfig(router_flags="--drain-timeout 50", prefill_flags="--drain-seconds 70")
    graces, _ = Supervisor(given).check_flags()
    assert (graces.router, graces.workers) == (50.0, 70.0)


def test_quoted_words_of_such_a_string_stay_together():
    """As a shell would split them."""
    config = UpConfig(decode_flags="--triton-cache-dir '/tmp/a folder'", prefill=0)
    decode, _ = plan(config, "model", "name", [1, 2, 3, 4], [])
    assert decode.arguments[-2:] == ["--triton-cache-dir", "/tmp/a folder"]


def test_an_empty_key_from_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """TANDEM_API_KEY= is a key that got lost, not a wish for none."""
    monkeypatch.setenv("TANDEM_API_KEY", "")
    assert "TANDEM_API_KEY: '' is not allowed" in refused("router --model x", capsys)


@contextmanager
def stranger(token: str | None) -> Iterator[str]:
    """A server that answers 200 to everything; the URL of its /ready."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if token is not None:
                self.send_header(HEADER_CHILD_TOKEN, token)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with HTTPServer((LOOPBACK, 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}/ready"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("token", [None, "of another stack"])
def test_somebody_elses_readiness_is_not_ours(token: str | None):
    """A process that still starts is not ready because another server answers on its port."""
    with stranger(token) as url:
        child = Child("router", ["--version"], url)
        child.start(sys.stderr)
        try:
            assert not child.check_ready()
        finally:
            child.kill()


def test_a_process_that_has_ended_is_not_ready():
    """Whoever answers now, it is not the one that was started."""
    with stranger("ours") as url:
        child = Child("router", ["--version"], url, token="ours")
        child.start(sys.stderr)
        assert child.process is not None
        child.process.wait(30)
        assert not child.check_ready()
        child.kill()
