"""Base images by digest: what a tag means is asked of its registry once, and then written down.

A tag may mean another image tomorrow. Images are built on NAME:TAG@sha256:…, from a Dockerfile that
has it or by a look-up at the registry at build time; `--pin` writes what was found into the
Dockerfiles. Speaks the registry protocol's two requests; needs no container tool.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPResponse
from pathlib import Path

from scripts.images.builder import ImageError

SECONDS = 30.0
KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
HOSTS = {"docker.io": "registry-1.docker.io"}
_REFERENCE = re.compile(
    r"(?P<host>[\w.-]+(?::\d+)?)/(?P<name>[a-z0-9._/-]+):(?P<tag>[\w][\w.-]{0,127})"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LINE = re.compile(r"^ARG BASE=(?P<reference>\S+)$", re.MULTILINE)
_FIELD = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Reference:
    """An image's name in full."""

    host: str
    name: str
    tag: str
    digest: str | None

    @classmethod
    def of(cls, text: str) -> Reference:
        """Raises ImageError for a short or malformed name."""
        found = _REFERENCE.fullmatch(text)
        if found is None:
            raise ImageError(f"base {text!r} is not HOST/NAME:TAG or HOST/NAME:TAG@sha256:DIGEST")
        return cls(**found.groupdict())

    def __str__(self) -> str:
        plain = f"{self.host}/{self.name}:{self.tag}"
        return f"{plain}@{self.digest}" if self.digest else plain


def base_of(dockerfile: Path) -> Reference:
    """The base that a Dockerfile names. Raises ImageError where it names none."""
    found = _LINE.search(dockerfile.read_text())
    if found is None:
        raise ImageError(f"{dockerfile} has no line ARG BASE=…")
    return Reference.of(found["reference"])


def pinned(reference: Reference, *, scheme: str = "https") -> Reference:
    """The same with its digest, looked up where it has none. Raises ImageError."""
    if reference.digest is not None:
        return reference
    host = HOSTS.get(reference.host, reference.host)
    url = f"{scheme}://{host}/v2/{reference.name}/manifests/{reference.tag}"
    try:
        answer = _head(url)
    except (OSError, ValueError, KeyError) as error:
        raise ImageError(
            f"the digest of {reference} cannot be looked up ({error}); give "
            f"--base HOST/NAME:TAG@sha256:…, or --make-base, or --floating-base to build on "
            f"whatever the tag means"
        ) from error
    digest = answer.get("Docker-Content-Digest", "")
    if not _DIGEST.fullmatch(digest):
        raise ImageError(f"{host} gives no digest for {reference}")
    return Reference(reference.host, reference.name, reference.tag, digest)


def pin(dockerfiles: list[Path], *, scheme: str = "https") -> list[Reference]:
    """Write the digest of each Dockerfile's base into it; what the bases are now."""
    found = [pinned(base_of(path), scheme=scheme) for path in dockerfiles]
    for path, reference in zip(dockerfiles, found, strict=True):
        path.write_text(_LINE.sub(f"ARG BASE={reference}", path.read_text(), count=1))
    return found


def _head(url: str) -> Message:
    """Headers of a manifest; as nobody in particular where the registry wants a token."""
    headers = {"Accept": ", ".join(KINDS)}
    try:
        return _ask(url, headers, "HEAD").headers
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        token = _token(error.headers.get("WWW-Authenticate", ""))
    return _ask(url, {**headers, "Authorization": f"Bearer {token}"}, "HEAD").headers


def _token(challenge: str) -> str:
    fields = dict(_FIELD.findall(challenge))
    query = urllib.parse.urlencode({k: fields[k] for k in ("service", "scope") if k in fields})
    with _ask(f"{fields['realm']}?{query}", {}, "GET") as answer:
        content = json.load(answer)
    return str(content["token"] if "token" in content else content["access_token"])


def _ask(url: str, headers: dict[str, str], method: str) -> HTTPResponse:
    request = urllib.request.Request(url, headers=headers, method=method)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=SECONDS)
    return answer
