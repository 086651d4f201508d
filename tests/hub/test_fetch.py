"""Hub ids against a small hub on loopback, each in a process of its own: the client reads its
endpoint and its cache from the environment once, when imported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Build = Callable[..., Path]
Prepare = Callable[..., dict[str, Any]]


class SmallHub(ThreadingHTTPServer):
    """Serves one repository, ``owner/name``, from a folder; ``gated`` makes it refuse."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.gated = False
        self.commit = COMMIT
        self.asked: list[str] = []
        self.sent: dict[str, int] = {}
        """Bytes of bodies by file."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0].removeprefix("/api/models")
        if not path.startswith("/owner/name"):
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif self.server.gated:
            self._answer(403, {"X-Error-Code": "GatedRepo"})
        elif self.path.startswith("/api/"):
            self._describe(*path.removeprefix("/owner/name/").split("/")[:2])
        else:
            self._file(path.split("/", 5)[5])

    def _describe(self, what: str, revision: str) -> None:
        if revision not in ("main", self.server.commit):
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        files = sorted(self.server.folder.iterdir())
        siblings = [{"rfilename": file.name} for file in files]
        body: Any = {"id": "owner/name", "sha": self.server.commit, "siblings": siblings}
        if what == "tree":
            body = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                for file in files
            ]
        return self._answer(200, {}, json.dumps(body).encode())

    def _file(self, name: str) -> None:
        file = self.server.folder / name
        if not file.is_file():
            return self._answer(404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": self.server.commit, "ETag": f'"{name}"'}
        body, asked = file.read_bytes(), self.headers.get("Range", "")
        status = 206 if asked.startswith("bytes=") else 200
        if status == 206:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {asked.removeprefix('bytes=')}/{len(body)}"
            body = body[int(first) : int(last) + 1]
        if self.command != "HEAD":
            self.server.sent[name] = self.server.sent.get(name, 0) + len(body)
        return self._answer(status, headers, body)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silent: a test's output is its own."""


@pytest.fixture
def hub(model_folder: Build) -> Iterator[SmallHub]:
    """A hub that serves a whole model, a file that nobody needs, and a GGUF file."""
    folder = model_folder("served")
    (folder / "README.md").write_text("not needed")
    server = SmallHub(folder)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


@pytest.fixture
def prepare_in_process(tmp_path: Path) -> Prepare:
    """Calls ``prepare`` in a new process; returns its result, or the error's type and text."""
    script = (
        "import json, sys\n"
        "from tandem.hub import HubError, prepare\n"
        "try:\n"
        "    model = prepare(sys.argv[1], progress=False, **json.loads(sys.argv[2]))\n"
        "    print(json.dumps({'path': str(model.path), 'revision': model.revision}))\n"
        "except HubError as error:\n"
        "    print(json.dumps({'error': type(error).__name__, 'text': str(error)}))\n"
    )

    def call(
        source: str, endpoint: str, *, offline: bool = False, **options: Any
    ) -> dict[str, Any]:
        environment = os.environ | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TANDEM_CACHE": str(tmp_path / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", script, source, json.dumps(options)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return call


def test_fetched_then_offline(hub: SmallHub, prepare_in_process: Prepare):
    """A repository is fetched at its commit, only what is needed, and serves offline afterwards."""
    first = prepare_in_process("owner/name", hub.url)
    assert first["revision"] == COMMIT
    names = {file.name for file in Path(first["path"]).iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert prepare_in_process("owner/name", "http://127.0.0.1:9", offline=True) == first


@pytest.mark.full
def test_weights_that_nobody_loads_are_not_fetched(hub: SmallHub, prepare_in_process: Prepare):
    """Neither a second form of them beside model.safetensors, nor one beside what an index names;
    what has another name is fetched where nothing else is there."""
    single = hub.folder / "model.safetensors"
    (hub.folder / "consolidated.safetensors").write_bytes(single.read_bytes())
    found = prepare_in_process("owner/name", hub.url)
    assert _weights_in(found) == {"model.safetensors"}

    shard = "model-00001-of-00001.safetensors"
    single.rename(hub.folder / shard)
    index = {"weight_map": {"lm_head.weight": shard}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.commit = COMMIT[::-1]
    found = prepare_in_process("owner/name", hub.url)
    assert _weights_in(found) == {shard}
    assert prepare_in_process("owner/name", "http://127.0.0.1:9", offline=True) == found

    (hub.folder / "model.safetensors.index.json").unlink()
    (hub.folder / shard).unlink()
    hub.commit = "f" * 40
    found = prepare_in_process("owner/name", hub.url)
    assert _weights_in(found) == {"consolidated.safetensors"}


def _weights_in(found: dict[str, Any]) -> set[str]:
    return {file.name for file in Path(found["path"]).glob("*.safetensors")}


def test_without_weights(hub: SmallHub, prepare_in_process: Prepare):
    """A router fetches what describes the model, and no weights."""
    found = prepare_in_process("owner/name", hub.url, weights=False)
    assert "model.safetensors" not in {file.name for file in Path(found["path"]).iterdir()}
    assert not any("safetensors" in path for path in hub.asked)


def test_gguf_of_a_repository(hub: SmallHub, gguf_file: Build, prepare_in_process: Prepare):
    """One GGUF file of a repository is fetched and converted."""
    gguf_file().rename(hub.folder / "tiny.gguf")
    found = prepare_in_process("owner/name/tiny.gguf", hub.url)
    assert found["revision"] == COMMIT
    assert (Path(found["path"]) / "model.safetensors").is_file()


def test_no_hub(prepare_in_process: Prepare):
    """Without a network the error says where to put the model instead."""
    found = prepare_in_process("owner/name", "http://127.0.0.1:9")
    assert found["error"] == "Offline"
    assert "hf download owner/name --local-dir FOLDER" in found["text"]


def test_offline_by_wish(prepare_in_process: Prepare):
    """With HF_HUB_OFFLINE a model that is not cached is the same error."""
    assert (
        prepare_in_process("owner/name", "http://127.0.0.1:9", offline=True)["error"] == "Offline"
    )


@pytest.mark.full
def test_refusals(hub: SmallHub, prepare_in_process: Prepare):
    """An unknown repository, revision or file and a gated repository are told apart."""
    assert prepare_in_process("other/name", hub.url)["error"] == "ModelNotFound"
    assert prepare_in_process("owner/name", hub.url, revision="v9")["error"] == "ModelNotFound"
    assert prepare_in_process("owner/name/no.gguf", hub.url)["error"] == "ModelNotFound"
    hub.gated = True
    found = prepare_in_process("owner/name", hub.url)
    assert found["error"] == "AccessDenied"
    assert "HF_TOKEN" in found["text"]
