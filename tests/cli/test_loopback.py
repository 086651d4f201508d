"""What runs on this machine is asked without a proxy, whatever the environment names."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.cli.answering import Answer, served

from tandem.base.listening import HEADER_CHILD_TOKEN
from tandem.cli import chat
from tandem.cli.bench import serve
from tandem.cli.inspect.requests import RouterClient
from tandem.cli.serve import listening
from tandem.cli.serve.children import Child
from tandem.cli.serve.listening import LOOPBACK, free_ports
from tandem.cli.serve.stack import _requests

TOKEN = "of this stack"
MODELS = b'{"data": [{"id": "served"}]}'
METRICS = b'vllm:num_requests_running{a="b"} 3\n'


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server, and a proxy in the environment that is not there."""
    (closed,) = free_ports(1)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{LOOPBACK}:{closed}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Said(Answer):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(HEADER_CHILD_TOKEN, TOKEN)
            self.end_headers()
            self.wfile.write(METRICS if self.path == "/metrics" else MODELS)

    with served(Said) as root:
        yield root


class Sleeper(Child):
    """A process of the stack that runs until it is killed."""

    def __init__(self, url: str) -> None:
        super().__init__("decode-0", ["decode"], f"{url}/ready", token=TOKEN)

    @property
    def is_running(self) -> bool:
        """As if it had been started: the server is a thread of this process."""
        return True


def test_a_process_of_the_stack_becomes_ready(url: str) -> None:
    """And tells what it has under way when the stack stops."""
    child = Sleeper(url)
    assert child.check_ready()
    assert _requests(child) == 3


@pytest.mark.full
def test_those_who_ask_a_router_reach_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`top` and `explain`, `chat`, and `bench serve` as it asks for the model."""
    for each in (url, url.replace(LOOPBACK, "localhost")):
        with RouterClient(each) as client:
            assert client.get("/v1/models")["data"][0]["id"] == "served"
        config = serve.ServeConfig(base_url=each)
        assert serve._first_model(config, {}) == "served"
        assert chat.run(["--url", each, "Hello"]) == 1  # it does not answer a POST
        assert "[501]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:8000", True),
        ("https://localhost", True),
        ("http://a.localhost", True),
        ("http://10.0.0.7:8000", False),
        ("http://example.com", False),
        ("http://localhost.example.com", False),
    ],
)
def test_hosts_elsewhere_are_asked_by_the_proxy(
    url: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with httpx.Client(mounts=listening.mounts(url)) as client:
        is_direct = client._transport_for_url(httpx.URL(url)) is client._transport
    assert is_direct is own
