"""`tandem run-batch` against a server that answers as the test says, and files that are wrong."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.batch import requests
from tandem.cli.batch.run_batch import run
from tandem.protocol.errors import InvalidParameter, TandemError

CHAT = "/v1/chat/completions"
Answers = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes]]


def line(number: int, **fields: Any) -> str:
    request = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": {"at": number}}
    return json.dumps(request | fields)


@pytest.fixture
def answering() -> Iterator[Callable[[Answers], str]]:
    """Start a server; it is given how often a body was seen before, and the body."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        seen: dict[str, int] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                before = seen[content.decode()] = seen.get(content.decode(), -1) + 1
                status, headers, body = answers(before, json.loads(content))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def written(path: Path) -> dict[str, Any]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    return {each["custom_id"]: each for each in lines}


def test_every_request_has_its_answer(
    answering: Callable[[Answers], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is told to come back is asked again; what is wrong is not."""

    def answers(before: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if body["at"] == 1:
            return 400, {}, b'{"error": {"message": "no"}}'
        if body["at"] % 3 == 0 and before == 0:
            return 503, {"Retry-After": "0"}, b"busy"
        usage = {"completion_tokens": 5}
        return 200, {}, json.dumps({"said": body["at"], "usage": usage}).encode()

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(line(number) for number in range(20)))
    url = answering(answers)

    status = run(["-i", str(source), "-o", str(target), "--url", url, "--concurrency", "4"])
    found = written(target)

    assert status == 1
    assert len(found) == 20
    assert found["c1"]["response"]["status_code"] == 400
    assert found["c1"]["response"]["body"]["error"]["message"] == "no"
    for number in (0, 2, 3, 19):
        answer = found[f"c{number}"]
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["said"] == number
        assert answer["error"] is None
    assert "20 of 20, 1 failed" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


def test_a_refusal_that_lasts_is_the_answer(
    answering: Callable[[Answers], str], tmp_path: Path
) -> None:
    """After as many tries as are allowed."""
    tries: list[int] = []

    def answers(before: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        tries.append(before)
        return 429, {"Retry-After": "0"}, b"{}"

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(0))
    flags = ["--url", answering(answers), "--max-attempts", "3"]

    assert run(["-i", str(source), "-o", str(target), *flags]) == 1
    assert tries == [0, 1, 2]
    assert written(target)["c0"]["response"]["status_code"] == 429


def test_a_server_that_is_gone_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was answered is not lost, nor taken for the whole."""
    monkeypatch.setattr(requests, "MAX_DEAD", 3)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(number) for number in range(50)))
    flags = ["--url", "http://127.0.0.1:9", "--max-attempts", "1", "--concurrency", "2"]

    with pytest.raises(OSError, match="no server answers"):
        run(["-i", str(source), "-o", str(target), *flags])
    assert not target.exists()
    partial = written(target.with_name("out.jsonl.part"))
    assert 3 <= len(partial) < 50
    assert all(each["error"]["code"] == "no_answer" for each in partial.values())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "at least one request"),
        (["{"], "line 1: line"),
        ([line(0), "3"], "line 2: line"),
        ([line(0), line(0)], "request 2: custom_id"),
        ([line(0, custom_id="")], "line 1: custom_id"),
        ([line(0, url="/v1/images")], "line 1: url"),
        ([line(0, method="GET")], "line 1: method"),
        ([line(0, body={"stream": True})], "line 1: body.stream"),
        ([line(0, body=[])], "line 1: line"),
    ],
)
def test_a_wrong_line_is_named_before_any_is_sent(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    with pytest.raises(InvalidParameter) as error:
        run(["-i", str(source), "-o", str(tmp_path / "out"), "--url", "http://127.0.0.1:9"])
    assert words in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--url", "http://127.0.0.1:9", "--model", "smollm2"],
        ["--url", "notaurl"],
        ["--url", "http://127.0.0.1:9", "--serve-flags", "--x"],
        ["--url", "http://127.0.0.1:9", "--concurrency", "0"],
        ["--url", "http://127.0.0.1:9", "--max-attempts", "0"],
        ["--url", "http://127.0.0.1:9", "--timeout", "0"],
        ["--url", "http://127.0.0.1:9", "--api-key", "schlüssel"],
        ["--url", "http://127.0.0.1:9", "--api-key", ""],
        ["--model", "smollm2", "--serve-flags", "--port 9"],
        ["--model", "smollm2", "--serve-flags", "--max-num-seqs 8 --host=0.0.0.0"],
        ["--model", "smollm2", "--ready-seconds", "-1"],
        ["--model", "smollm2", "--serve-flags='--x"],
        ["--model", "smollm2", "-o", "/nonexistent/out.jsonl"],
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(TandemError) as error:
        run(["-i", str(tmp_path / "absent"), "-o", str(tmp_path / "out"), *flags])
    assert "absent" not in str(error.value)


@pytest.mark.parametrize(
    ("soft", "hard", "most"), [(1024, 8192, 4096), (1024, 1024, 960), (40, 40, 1)]
)
def test_each_request_at_a_time_has_its_descriptor(
    soft: int, hard: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is raised as far as it may be; beyond it requests failed as if nobody answered."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, now: limits.append(now))
    words = ["-i", str(tmp_path / "absent"), "-o", str(tmp_path / "out")]
    words += ["--url", "http://127.0.0.1:9"]
    with pytest.raises(FileNotFoundError):
        run(words)  # so many as there may be, where that is fewer than usual
    words.append("--concurrency")
    with pytest.raises(InvalidParameter, match=f"--concurrency: .* 1 to {most:,}"):
        run([*words, str(most + 1)])
    assert limits[-1] == (hard, hard)
    with pytest.raises(FileNotFoundError):
        run([*words, str(most)])
