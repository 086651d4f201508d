"""Images are built on a base that a digest names, looked up at a registry that speaks HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from scripts.images import digest
from scripts.images.__main__ import main
from scripts.images.builder import ROLES, ImageError, Recipe

DIGEST = f"sha256:{'ab' * 32}"


class Registry(BaseHTTPRequestHandler):
    """Knows one image, and wants a token for it."""

    def do_HEAD(self) -> None:
        if self.headers.get("Authorization") != "Bearer sesame":
            here = f"http://{self.headers['Host']}/token"
            self.send_response(401)
            self.send_header("WWW-Authenticate", f'Bearer realm="{here}",service="s",scope="pull"')
        elif self.path == "/v2/library/python/manifests/3":
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        elif self.path == "/v2/library/vague/manifests/3":
            self.send_response(200)
        else:
            self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        assert self.path == "/token?service=s&scope=pull"
        content = json.dumps({"token": "sesame"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_tag_is_pinned_to_what_the_registry_says(registry: str) -> None:
    found = digest.pinned(digest.Reference.of(f"{registry}/library/python:3"), scheme="http")
    assert str(found) == f"{registry}/library/python:3@{DIGEST}"


def test_a_digest_is_never_looked_up() -> None:
    given = digest.Reference.of(f"127.0.0.1:9/library/python:3@{DIGEST}")
    assert digest.pinned(given) is given


@pytest.mark.parametrize("image", ["library/vague:3", "library/unknown:3"])
def test_without_a_digest_nothing_is_built(registry: str, image: str) -> None:
    """A registry that says none, or does not know the image, is an error in words."""
    with pytest.raises(ImageError, match="digest"):
        digest.pinned(digest.Reference.of(f"{registry}/{image}"), scheme="http")


@pytest.mark.parametrize(
    "text", ["python:3", "docker.io/library/python", "a b", f"python@{DIGEST}"]
)
def test_a_short_name_is_refused(text: str) -> None:
    with pytest.raises(ImageError, match="HOST/NAME:TAG"):
        digest.Reference.of(text)


def test_pins_are_written_into_dockerfiles(registry: str, tmp_path: Path) -> None:
    """The rest of the file stays as it is, and a second pin changes nothing."""
    path = tmp_path / "Dockerfile"
    path.write_text(f"# why\nARG BASE={registry}/library/python:3\n\nFROM ${{BASE}}\n")
    digest.pin([path], scheme="http")
    text = f"# why\nARG BASE={registry}/library/python:3@{DIGEST}\n\nFROM ${{BASE}}\n"
    assert path.read_text() == text
    digest.pin([path], scheme="http")
    assert path.read_text() == text


def test_all_images_stand_on_one_base() -> None:
    """Its name is complete, so that its digest can be looked up."""
    assert len({digest.base_of(Recipe(role, "").dockerfile) for role in ROLES}) == 1


def test_no_image_is_built_on_a_tag_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A base given by tag whose registry does not answer ends the build before it begins."""
    words = ["--tool", "buildah", "--base", "127.0.0.1:9/library/python:3", "router"]
    assert main(words) == 1
    assert "--floating-base" in capsys.readouterr().err
