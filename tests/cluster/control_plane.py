"""The control plane's machine: etcd, the API server, then scheduler and controllers."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import layout
from tests.cluster.machines import Machines

STORE = "http://127.0.0.1:2379"
NODE_GRACE_SECONDS = 12
"""A node that was silent for this long counts as dead; Kubernetes' own default is 50 s."""


def start(machines: Machines) -> None:
    """Start the machine, the store and the API server."""
    machines.start(layout.CONTROL_PLANE, layout.API_ADDRESS)
    _spawn(
        machines,
        "etcd",
        "--unsafe-no-fsync",
        data_dir=layout.STATE / "etcd",
        listen_client_urls=STORE,
        advertise_client_urls=STORE,
        listen_peer_urls="http://127.0.0.1:2380",
        log_level="warn",
    )
    pki = layout.PKI
    _spawn(
        machines,
        "kube-apiserver",
        etcd_servers=STORE,
        bind_address=layout.API_ADDRESS,
        advertise_address=layout.API_ADDRESS,
        service_cluster_ip_range=layout.SERVICES,
        authorization_mode="Node,RBAC",
        enable_admission_plugins="NodeRestriction",
        allow_privileged="true",
        client_ca_file=pki / "ca.crt",
        tls_cert_file=pki / "apiserver.crt",
        tls_private_key_file=pki / "apiserver.key",
        kubelet_certificate_authority=pki / "ca.crt",
        kubelet_client_certificate=pki / "kubelet-client.crt",
        kubelet_client_key=pki / "kubelet-client.key",
        kubelet_preferred_address_types="InternalIP",
        service_account_issuer="https://kubernetes.default.svc",
        service_account_key_file=pki / "sa.pub",
        service_account_signing_key_file=pki / "sa.key",
        requestheader_client_ca_file=pki / "front-proxy-ca.crt",
        requestheader_allowed_names="front-proxy-client",
        requestheader_extra_headers_prefix="X-Remote-Extra-",
        requestheader_group_headers="X-Remote-Group",
        requestheader_username_headers="X-Remote-User",
        proxy_client_cert_file=pki / "front-proxy-client.crt",
        proxy_client_key_file=pki / "front-proxy-client.key",
        enable_aggregator_routing="true",
    )


def start_controllers(machines: Machines) -> None:
    """Scheduler and controllers; they end at once where the API server is not ready yet."""
    _controller(machines, "scheduler")
    _controller(
        machines,
        "controller-manager",
        use_service_account_credentials="true",
        service_account_private_key_file=layout.PKI / "sa.key",
        root_ca_file=layout.PKI / "ca.crt",
        cluster_signing_cert_file=layout.PKI / "ca.crt",
        cluster_signing_key_file=layout.PKI / "ca.key",
        service_cluster_ip_range=layout.SERVICES,
        node_monitor_grace_period=f"{NODE_GRACE_SECONDS}s",
        node_monitor_period="2s",
    )


def _controller(machines: Machines, name: str, **flags: str | Path) -> None:
    config = layout.PKI / f"{name}.kubeconfig"
    _spawn(
        machines,
        f"kube-{name}",
        kubeconfig=config,
        authentication_kubeconfig=config,
        authorization_kubeconfig=config,
        bind_address="127.0.0.1",
        leader_elect="false",
        **flags,
    )


def _spawn(machines: Machines, component: str, *switches: str, **flags: str | Path) -> None:
    written = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    place = layout.CONTROL_PLANE
    machines.spawn(place, component, layout.BIN / component, *written, *switches)
