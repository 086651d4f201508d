"""The client of the API server, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tandem.operator.cluster import Cluster

KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "here",
    "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "me", "user": {"token": "secret"}}],
    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
}


def test_a_call_reads_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may change it meanwhile; where there is a proxy is known from the start."""
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(KUBECONFIG))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:2")
    settings = Cluster(kubeconfig=path)._api.configuration

    def changed() -> dict[str, str]:
        raise KeyError("it changed while it was read")

    monkeypatch.setattr("kubernetes.client.configuration.getproxies", changed)
    assert settings.auth_settings()["BearerToken"]["value"] == "Bearer secret"
    assert settings.proxy == "http://127.0.0.1:2"
