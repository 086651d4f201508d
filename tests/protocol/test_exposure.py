"""Which addresses strangers can reach, and that nobody listens there in clear text unasked."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.listening import is_loopback
from tandem.protocol.errors import InvalidParameter
from tandem.router.config import RouterConfig
from tandem.worker.server_config import ServerConfig

OPEN = ["0.0.0.0", "::", "[::]", "", "*", "10.0.0.7", "worker-3", "localhost.example.org"]
KEYS: dict[str, Any] = {"curve_keys": "keys", "curve_peers": "peers"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_the_loopback_is_known_in_every_spelling(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", OPEN)
def test_a_worker_listens_to_other_machines_with_curve_or_by_name_only(host: str):
    """Without keys it is refused in words that name the flag which allows it."""
    with pytest.raises(InvalidParameter, match=r"host: .* --allow-plaintext"):
        ServerConfig(host=host)
    with pytest.raises(InvalidParameter, match="host"):
        ServerConfig(host=host, curve_keys="keys")
    assert ServerConfig(host=host, **KEYS).host == host
    assert ServerConfig(host=host, allow_plaintext=True).host == host


def test_a_worker_started_by_hand_listens_on_the_loopback():
    assert is_loopback(ServerConfig().host)


@pytest.mark.parametrize("worker", ["10.0.0.7:5570", "worker-3:5570"])
def test_a_router_speaks_to_other_machines_with_curve_or_by_name_only(worker: str):
    """Prompts do not cross a network in clear text unless that is asked for."""
    with pytest.raises(InvalidParameter, match=r"workers: .* --allow-plaintext"):
        RouterConfig(workers=("127.0.0.1:5570", worker))
    assert RouterConfig(workers=(worker,), **KEYS).workers == (worker,)
    assert RouterConfig(workers=(worker,), allow_plaintext=True).workers == (worker,)


def test_pods_are_spoken_to_with_curve_or_by_name_only():
    """Discovery finds workers of other machines."""
    found: dict[str, Any] = {"discovery_selector": "s"}
    with pytest.raises(InvalidParameter, match=r"discovery_selector: .* --allow-plaintext"):
        RouterConfig(**found)
    assert RouterConfig(**found, **KEYS).discovery_selector == "s"
    assert RouterConfig(**found, allow_plaintext=True).discovery_selector == "s"


@pytest.mark.parametrize(
    "given",
    [{"api_key": ("",)}, {"api_key": ("good", " ")}, {"api_keys_dir": ""}],
)
def test_no_empty_key_leaves_the_router_open(given: dict[str, object]):
    """A key that was meant and is empty is an error, not a router without keys."""
    with pytest.raises(InvalidParameter, match=next(iter(given))):
        RouterConfig(**given)  # type: ignore[arg-type]
