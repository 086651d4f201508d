"""Who may ask a worker for KV: keys, a secret that is given, or one of this user's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.settings.worker_settings import handoff_config
from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ENV_CACHE
from tandem.worker.server_config import ServerConfig

KEYS = {"curve_keys": "keys", "curve_peers": "peers"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(server: dict[str, Any] | None = None, **given: Any) -> KVTransferConfig:
    return handoff_config({KVTransferConfig: given}, ServerConfig(**(server or {})))


def test_the_secret_of_the_loopback_is_random_kept_and_ours_alone(cache: Path):
    """Processes of one user find the same one, which nobody else can compute or read."""
    first = config().kv_secret
    assert len(first) >= 32
    assert config().kv_secret == first
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    assert config().kv_secret != first


def test_a_secret_that_others_can_read_is_refused(cache: Path):
    """A file that anybody may have read or made is not trusted."""
    config()
    (kept,) = cache.iterdir()
    kept.chmod(0o644)
    with pytest.raises(InvalidParameter, match=r"kv_secret: .*other users can access"):
        config()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_asks_for_a_secret(cache: Path):
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(InvalidParameter, match="kv_secret"):
        config()


def test_a_cache_that_is_a_file_asks_for_a_secret(cache: Path):
    """The words name the setting and the file."""
    cache.write_text("")
    with pytest.raises(InvalidParameter, match=r"kv_secret: .*kv-secret"):
        config()


def test_other_machines_reach_the_control_port_with_keys_or_by_name_only():
    """A bind beyond the loopback without CURVE is refused."""
    with pytest.raises(InvalidParameter, match=r"kv_control_host: .* --allow-plaintext"):
        config(kv_control_host="0.0.0.0", kv_secret="shared by all of them")
    assert config(KEYS, kv_control_host="0.0.0.0").kv_secret == ""


def test_clear_text_beyond_the_loopback_wants_a_secret_that_is_given():
    """A secret of this machine's cache would be of no use elsewhere, and an empty one is none."""
    plain = {"allow_plaintext": True}
    with pytest.raises(InvalidParameter, match=r"kv_secret: .*a secret that all workers"):
        config(plain, kv_control_host="0.0.0.0")
    given = config(plain, kv_control_host="0.0.0.0", kv_secret="shared by all of them")
    assert given.kv_secret == "shared by all of them"
