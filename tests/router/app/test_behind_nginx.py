"""nginx with its defaults in front: it ends what sends nothing for a minute, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.own_ports import own_ports
from tests.router.behaviours import Make
from tests.router.fake_worker import Turn, serve_well
from tests.router.http_server import ANSWER, Served
from tests.waiting import wait_for

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
FIRST_TOKEN = 120.0
"""Seconds that a stream waits for it; nginx reads for 60."""
MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 200},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 200},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 200},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 200},
}
LAST = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/responses": "event: response.completed",
    "/v1/messages": "event: message_stop",
}
CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {url};
        }}
    }}
}}
"""
"""Where it may write, where it listens, and what it is in front of: all else is its default."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


@contextmanager
def nginx(folder: Path, url: str) -> Iterator[str]:
    """Run nginx in front of a server; the address to ask."""
    assert NGINX is not None
    (port,) = own_ports(1)
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, url=url))
    with subprocess.Popen([NGINX, "-c", str(config)]) as process:
        try:
            front = f"http://127.0.0.1:{port}"
            wait_for(lambda: _answers(front))
            yield front
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return clear_text.get(f"{url}/health").status_code < 500
    except httpx.TransportError:
        return False


def _late(turn: Turn) -> Iterator[float]:
    """Accept at once, and compute for long."""
    turn.accept()
    began = time.monotonic()
    while time.monotonic() - began < FIRST_TOKEN:
        yield 0.1
    yield from serve_well(turn)


def _stream(front: str, path: str) -> tuple[int, str, float, float]:
    """Status, text, and seconds until the headers and the end."""
    began = time.monotonic()
    body = {"model": "fake", "stream": True, **CALLS[path]}
    with (
        httpx.Client(verify=clear_text.NO_TLS, timeout=200) as client,
        client.stream("POST", front + path, json=body) as answer,
    ):
        headers = time.monotonic() - began
        text = answer.read().decode()
        return answer.status_code, text, headers, time.monotonic() - began


def _said(text: str) -> str:
    found = []
    for line in text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        found += [
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for choice in event.get("choices", ())
        ]
        delta = event.get("delta", "")
        found.append(delta if isinstance(delta, str) else delta.get("text", ""))
    return "".join(found)


def test_a_stream_that_waits_two_minutes_for_its_first_token_arrives_whole(
    small_model: Path, tmp_path: Path, decode: Make
) -> None:
    """Of every API. Without keep-alives nginx answers 504 after one minute."""
    patient: Any = {"progress_timeout": 600.0, "stall_timeout": 600.0}
    kept = Served(str(small_model), [decode(behaviour=_late)], **patient)
    silent = Served(str(small_model), [decode(behaviour=_late)], sse_keep_alive=0.0, **patient)
    for name in ("kept", "silent"):
        (tmp_path / name).mkdir()
    try:
        with (
            nginx(tmp_path / "kept", kept.url) as front,
            nginx(tmp_path / "silent", silent.url) as without,
            ThreadPoolExecutor() as pool,
        ):
            ask: Callable[..., Any] = pool.submit
            cut = ask(_stream, without, "/v1/chat/completions")
            streams = {path: ask(_stream, front, path) for path in CALLS}
            for path, stream in streams.items():
                status, text, headers, whole = stream.result()
                print(f"{path}: {status}, headers {headers:.1f} s, whole {whole:.1f} s")
                print(f"  {text.count(': keep-alive')} comments")
                assert status == 200
                assert headers < FIRST_TOKEN / 4
                assert whole > FIRST_TOKEN
                assert _said(text) == ANSWER
                assert LAST[path] in text
            status, _, _, seconds = cut.result()
            print(f"without keep-alives: {status} after {seconds:.1f} s")
            assert status == 504
    finally:
        kept.stop()
        silent.stop()
