"""Certificates and kubeconfigs of a cluster, by openssl: they live as long as the cluster does."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tests.cluster import layout
from tests.cluster.processes import run

DAYS = "365"
USAGE = "extendedKeyUsage=clientAuth,serverAuth"
USERS = {
    "admin": ("kubernetes-admin", "system:masters"),
    "scheduler": ("system:kube-scheduler", ""),
    "controller-manager": ("system:kube-controller-manager", ""),
    "proxy": ("system:kube-proxy", ""),
}
"""File to common name and group."""


def make(nodes: Mapping[str, str]) -> None:
    """All of them, into the state's pki folder; ``nodes`` are names with addresses."""
    layout.PKI.mkdir(parents=True, mode=0o700)
    for authority in ("ca", "front-proxy-ca"):
        _authority(authority)
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(_issue, "apiserver", "kube-apiserver", names=_api_names()),
            pool.submit(_issue, "kubelet-client", "apiserver-kubelet-client", "system:masters"),
            pool.submit(_issue, "front-proxy-client", "front-proxy-client", by="front-proxy-ca"),
            pool.submit(_token_key),
            *(pool.submit(_user, file, *who) for file, who in USERS.items()),
            *(pool.submit(_node, node, address) for node, address in nodes.items()),
        ]
        for job in jobs:
            job.result()


def _api_names() -> list[str]:
    service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    service.append("kubernetes.default.svc.cluster.local")
    return [layout.API_ADDRESS, "127.0.0.1", layout.API_SERVICE, "localhost", *service]


def _node(node: str, address: str) -> None:
    name, group = f"system:node:{node}", "system:nodes"
    _issue(f"{node}-serving", name, group, names=[node, address, "127.0.0.1"])
    _user(node, name, group)


def _user(file: str, name: str, group: str) -> None:
    _issue(file, name, group)
    _kubeconfig(file)


def _authority(file: str) -> None:
    _openssl(file, f"/CN={file}", "-addext", "keyUsage=critical,keyCertSign,cRLSign")


def _issue(
    file: str, name: str, group: str = "", *, by: str = "ca", names: list[str] | None = None
) -> None:
    """A key with a certificate for both ends of TLS, signed by the authority ``by``."""
    subject = (f"/O={group}" if group else "") + f"/CN={name}"
    signer = ["-CA", _path(f"{by}.crt"), "-CAkey", _path(f"{by}.key")]
    extensions = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", USAGE]
    if names:
        listed = ",".join(f"{'IP' if each[0].isdigit() else 'DNS'}:{each}" for each in names)
        extensions += ["-addext", f"subjectAltName={listed}"]
    _openssl(file, subject, *signer, *extensions)


def _openssl(file: str, subject: str, *more: str) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
    out = ["-keyout", _path(f"{file}.key"), "-out", _path(f"{file}.crt")]
    run("openssl", "req", "-x509", *key, "-days", DAYS, "-subj", subject, *out, *more)


def _token_key() -> None:
    """The key pair that signs the tokens of service accounts."""
    run("openssl", "genrsa", "-out", _path("sa.key"), "2048")
    run("openssl", "rsa", "-in", _path("sa.key"), "-pubout", "-out", _path("sa.pub"))


def _kubeconfig(file: str) -> None:
    server = f"https://{layout.API_ADDRESS}:{layout.API_PORT}"
    cluster = {"server": server, "certificate-authority-data": _encoded("ca.crt")}
    user = {
        "client-certificate-data": _encoded(f"{file}.crt"),
        "client-key-data": _encoded(f"{file}.key"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": file}}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": file, "user": user}],
    }
    (layout.PKI / f"{file}.kubeconfig").write_text(json.dumps(config))


def _path(file: str) -> str:
    return str(layout.PKI / file)


def _encoded(file: str) -> str:
    return base64.b64encode((layout.PKI / file).read_bytes()).decode()
