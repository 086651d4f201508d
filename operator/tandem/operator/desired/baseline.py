"""The baseline Pod Security profile, which all pods keep.

It bounds the rights of an LLMService's author (docs/decisions/pod-security.md). The chart's
admission policy has the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.operator.desired.naming import Manifest, map_of, maps_of

HOST = ("hostNetwork", "hostPID", "hostIPC")
CAPABILITIES = (
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
)
"""Capabilities that a container may add."""
SYSCTLS = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
)
SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
CONTAINERS = ("containers", "initContainers", "ephemeralContainers")


def beyond_baseline(pod: Manifest) -> str | None:
    """Return the first field of a pod's spec beyond the profile, with its value, or None."""
    return next(_findings(pod), None)


def _findings(pod: Manifest) -> Iterator[str]:
    for field in HOST:
        if pod.get(field):
            yield f"{field}: {pod[field]}"
    for volume in maps_of(pod.get("volumes")):
        if "hostPath" in volume:
            yield f"volumes[{volume.get('name')}].hostPath"
    context = pod.get("securityContext")
    for sysctl in maps_of(map_of(context).get("sysctls")):
        if sysctl.get("name") not in SYSCTLS:
            yield f"securityContext.sysctls[{sysctl.get('name')}]"
    yield from _of_context(context, "securityContext")
    for field in CONTAINERS:
        for container in maps_of(pod.get(field)):
            yield from _of_container(container, f"{field}[{container.get('name')}]")


def _of_container(container: Manifest, at: str) -> Iterator[str]:
    for port in maps_of(container.get("ports")):
        if port.get("hostPort"):
            yield f"{at}.ports.hostPort: {port['hostPort']}"
    context = map_of(container.get("securityContext"))
    place = f"{at}.securityContext"
    if context.get("privileged"):
        yield f"{place}.privileged: {context['privileged']}"
    if context.get("procMount", "Default") != "Default":
        yield f"{place}.procMount: {context['procMount']}"
    added = map_of(context.get("capabilities")).get("add")
    for name in added if isinstance(added, list) else ():
        if name not in CAPABILITIES:
            yield f"{place}.capabilities.add: {name}"
    yield from _of_context(context, place)


def _of_context(context: Any, at: str) -> Iterator[str]:
    """Yield the violations in fields that pods and containers share."""
    given = map_of(context)
    for field in ("seccompProfile", "appArmorProfile"):
        if map_of(given.get(field)).get("type") == "Unconfined":
            yield f"{at}.{field}.type: Unconfined"
    labels = map_of(given.get("seLinuxOptions"))
    if labels.get("type", "") not in SELINUX_TYPES or labels.get("user") or labels.get("role"):
        yield f"{at}.seLinuxOptions"
    if map_of(given.get("windowsOptions")).get("hostProcess"):
        yield f"{at}.windowsOptions.hostProcess"
