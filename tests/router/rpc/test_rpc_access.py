"""Every method of gRPC, in many spellings, with every kind of key."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.own_ports import own_ports
from tests.router.http_server import Served
from tests.router.rpc.raw_client import REFLECT, RawClient, status_of

from tandem.protocol.names import HEADER_CANARY
from tandem.router.api.grpc.server import NAME

pytestmark = pytest.mark.full

Code = grpc.StatusCode
HEALTH = "/grpc.health.v1.Health/Check"
METHODS = [
    *(f"/{NAME}/{name}" for name in ("Generate", "Embed", "Score", "Tokenize", "Abort")),
    *(f"/{NAME}/GetModelInfo", REFLECT),
    HEALTH,
]
KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "tenant": {"authorization": "Bearer tenant"},
    "tenant by x-api-key": {"x-api-key": "tenant"},
    "admin": {"authorization": "Bearer admin"},
    "wrong": {"authorization": "Bearer wrong"},
    "canary": {HEADER_CANARY.lower(): "sesame"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "both keys": {"api_key": ("tenant",), "admin_api_key": ("admin",)},
    "API keys alone": {"api_key": ("tenant",)},
    "no keys": {},
}


def spellings(path: str) -> Iterator[str]:
    """Paths that are not this one, though some server could take them for it."""
    service, _, method = path[1:].partition("/")
    for end in ("%0a", "%0d", "%09", "%00", "%20", "/", "%2f", "//", ";", ";a=b", "%3b", "?a=b"):
        yield path + end
    yield from ("/" + path, "/." + path, "/x/.." + path, "/%2e%2e" + path, "/health/.." + path)
    yield from (path.upper(), path.lower(), path.title(), path.replace("/", "//"))
    yield from (f"/{service}%2f{method}", f"/{service}/{method[:-1]}", f"/{service}/")
    yield from (f"{HEALTH}/../..{path}", f"/grpc.health.v1.Health/{method}", f"{HEALTH}x")
    yield from (HEALTH[:-1], f"/{service}", path.replace("v1", "v2"), "/")


def may(setting: str, key: str, path: str) -> bool:
    if path == HEALTH or setting == "no keys" or key.startswith("tenant"):
        return True
    return key == "admin" and setting == "both keys"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_key_opens_its_methods_alone_however_they_are_spelled(
    serve: Callable[..., Served], setting: str, tmp_path: Path
) -> None:
    """The matrix: a method that exists asks for the key; one that does not is never answered."""
    (tmp_path / "token").write_text("sesame")
    (port,) = own_ports(1)
    token = {"canary_token_file": str(tmp_path / "token")}
    serve(wait=False, grpc_port=port, **token, **SETTINGS[setting]).wait_started()
    client = RawClient(port)
    counts: Counter[Code] = Counter()
    for method, key in itertools.product(METHODS, KEYS):
        paths = [method, *(each for each in spellings(method) if each not in METHODS)]
        named: Any = KEYS[key]
        calls = [client.start(path=path, **named) for path in paths]
        for path, call in zip(paths, calls, strict=True):
            status, words = status_of(call)
            where = f"{setting}: {path} with {key}: {status} {words}"
            counts[status] += 1
            if not may(setting, key, path):
                assert status is Code.UNAUTHENTICATED, where
            elif path == method:
                assert status not in (Code.UNAUTHENTICATED, Code.UNIMPLEMENTED), where
            else:
                assert status is Code.UNIMPLEMENTED, where
    client.close()
    print(f"{setting}: {counts.total()} calls, {len(METHODS)} methods, statuses {dict(counts)}")
    assert counts.total() > 1_300
