"""The app on a real uvicorn, in a thread with a loop of its own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import openai
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.waiting import wait_for

from tandem.link.liveness import LinkTimes
from tandem.router.app import create_app
from tandem.router.config import RouterConfig
from tandem.router.server import make_server
from tandem.text.tokenizer import Tokenizer

ANSWER = "Paris is the capital of France, naïve café 日本 😀!"


class Served:
    """Started on construction; ready when the workers are."""

    def __init__(
        self,
        model: str,
        workers: Sequence[FakeWorker],
        *,
        wait: bool = True,
        beat_timeout: float = 5.0,
        **settings: Any,
    ) -> None:
        """``beat_timeout`` is a router's own: a busy machine may leave a worker without a turn for
        long."""
        tokenizer = Tokenizer.load(model)
        for worker in workers:
            worker.answer = tokenizer.encode(ANSWER, add_special_tokens=False)
            worker.end = tokenizer.eos_token_ids[0]
        self.workers = workers
        self.tokenizer = tokenizer
        fields = {
            "model": model,
            "workers": tuple(worker.endpoint for worker in workers),
            "worker_wait": 0.3,
            "resume_wait": 0.3,
            "drain_timeout": 1.0,
            **settings,
        }
        config = RouterConfig(**fields)
        self.app = create_app(config)
        self.app.state.router.pool._times = LinkTimes(0.1, beat_timeout, config.stall_timeout)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = make_server(self.app, config)
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self._thread.start()
        if wait:
            self.wait_ready()

    def wait_started(self) -> None:
        """Until the server listens, whatever the workers do."""
        wait_for(lambda: self.server.started)

    def wait_ready(self) -> None:
        """Until every worker is up and its links are known."""
        self.wait_started()
        wait_for(self._is_ready, every=0.02, seen=lambda: self.get("/debug/fleet")["workers"])

    def _is_ready(self) -> bool:
        fleet = self.get("/debug/fleet")["workers"]
        linked = all(worker["peers"] for worker in fleet if "decode" in worker["name"])
        needs_link = any(worker.role == "prefill" for worker in self.workers)
        return len(fleet) == len(self.workers) and (linked or not needs_link)

    def get(self, path: str) -> Any:
        return clear_text.get(self.url + path).json()

    def post(self, path: str, **request: Any) -> httpx.Response:
        return clear_text.post(self.url + path, timeout=60, **request)

    def raw_post(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection with a request on it, of which nobody reads the answer unless the caller
        does."""
        connection = socket.create_connection(self.socket.getsockname())
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def metrics(self) -> str:
        return clear_text.get(self.url + "/metrics").text

    def client(self, **settings: Any) -> openai.OpenAI:
        fields = {"api_key": "none", "max_retries": 0, "timeout": 60, **settings}
        fields.setdefault("http_client", openai.DefaultHttpxClient(verify=clear_text.NO_TLS))
        return openai.OpenAI(base_url=self.url + "/v1", **fields)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(15)
        self.socket.close()
        assert not self._thread.is_alive()
