"""Settings of the operator's process; cli/ turns each field into a flag and a variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tandem.base.listening import ANY_4, ANY_6
from tandem.base.settings import (
    check_integer,
    check_positive,
    setting,
    values_of_file,
)
from tandem.protocol.errors import InvalidParameter
from tandem.tracing.config import TracingConfig

IMAGES = "ghcr.io/tandem-serving"
MAX_PULL_SECRETS = 16
_SECRET = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Intervals and limits that ``timings_file`` changes. Times are seconds."""

    resync_seconds: float = 60.0
    """Interval after which every service is reconciled again."""
    canary_seconds: float = 60.0
    """Interval between two canaries of a serving service."""
    unschedulable_seconds: float = 60.0
    """Time after which a pending pod counts as unschedulable."""
    key_publish_seconds: float = 90.0
    """Time after which pods that do not report are assumed to have read new public keys."""
    router_silence_seconds: float = 4.0
    """Silence after which a router is removed from the Service, while one on another node answers.
    0: Kubernetes removes it, after 40 s or more."""
    lease_seconds: float = 15.0
    """Time after which another replica may take a Lease that is not renewed."""
    renew_deadline: float = 10.0
    """Time after which a leader that cannot renew the Lease exits."""
    retry_seconds: float = 2.0
    """Interval between two attempts to take the Lease."""
    workers: int = 4
    """Maximum number of services that are reconciled at once."""
    model_jobs: int = 10
    """Maximum number of concurrent Jobs that fetch or read models."""

    def check_timings(self) -> None:
        """Raise InvalidParameter for a value that is out of its range."""
        check_integer("workers", self.workers, 1, 64)
        check_integer("model_jobs", self.model_jobs, 1, 10_000)
        for each in fields(Timings):
            if each.name not in ("workers", "model_jobs"):
                or_zero = each.name == "router_silence_seconds"
                check_positive(each.name, getattr(self, each.name), or_zero=or_zero)
        if not self.retry_seconds < self.renew_deadline < self.lease_seconds:
            raise InvalidParameter(
                "renew_deadline", self.renew_deadline, "between retry_seconds and lease_seconds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings(TracingConfig, Timings):
    """Settings of one operator process. Times are seconds."""

    namespaces: tuple[str, ...] = setting(
        (), "Namespaces to serve; repeatable. Default: the whole cluster."
    )
    own_namespace: str = ""
    """Namespace of the operator itself, for its Lease, by ENV_POD_NAMESPACE."""
    worker_image: str = setting(
        f"{IMAGES}/tandem-worker:0.1.0", "Image of workers of services that set none."
    )
    router_image: str = setting(f"{IMAGES}/tandem-router:0.1.0", "Image of routers.")
    image_pull_policy: str = setting(
        "",
        "Pull policy of the containers. Default: Kubernetes' own.",
        choices=("", "Always", "IfNotPresent", "Never"),
    )
    service_pull_secrets: tuple[str, ...] = setting(
        (),
        "Pull secret of services that set none; repeatable. It must exist in each service's "
        "namespace.",
    )
    pod_host: str = ""
    """Address on which pods listen, by the family of the API server's address."""
    metrics_namespace: str = setting(
        "", "Namespace that may scrape worker metrics. Default: the operator's."
    )
    api_server_ports: tuple[int, ...] = setting(
        (443, 6443),
        "API server ports that NetworkPolicies allow to routers. Include its own port if the "
        "network plugin compares ports behind the Service.",
    )
    dns_ports: tuple[int, ...] = setting(
        (53,),
        "DNS ports that NetworkPolicies allow. Include the port of the DNS pods.",
    )
    allow_privileged_pods: bool = setting(
        False,
        "Allow podTemplates beyond the baseline Pod Security profile. Creators of an "
        "LLMService may then be root on nodes.",
    )
    allow_any_secret: bool = setting(
        False,
        "Let LLMServices use Secrets without the label tandem.dev/llmservices=allowed: a user who "
        "may create one may then read any Secret of its namespace.",
    )
    port: int = setting(8080, "Port of /livez, /readyz and /metrics. 0: any free port.")
    lease_name: str = setting("tandem-operator", "Name of the Lease.")
    timings_file: str | None = setting(
        None,
        "YAML file with intervals and limits of the operator (docs/reference/limits.md).",
    )

    def __post_init__(self) -> None:
        TracingConfig.__post_init__(self)
        check_integer("port", self.port, 0, 65535)
        for name in ("api_server_ports", "dns_ports"):
            _check_ports(name, getattr(self, name))
        _check_secrets("service_pull_secrets", self.service_pull_secrets)
        self.check_timings()

    @property
    def listening_host(self) -> str:
        """Return the address to listen on, of the pods' family; IPv4's if that is not known."""
        return self.pod_host or ANY_4


def _check_ports(param: str, ports: tuple[int, ...]) -> None:
    """Raise InvalidParameter unless there are ports, as a rule without any opens all, and each is
    valid."""
    if not ports:
        raise InvalidParameter(param, ports, "one port or more")
    for port in ports:
        check_integer(param, port, 1, 65535)


def _check_secrets(param: str, secrets: tuple[str, ...]) -> None:
    """Raise InvalidParameter unless each is the name of a Secret, and is listed once."""
    if len(secrets) > MAX_PULL_SECRETS:
        raise InvalidParameter(param, len(secrets), f"{MAX_PULL_SECRETS} at most")
    for name in secrets:
        if len(name) > 253 or not _SECRET.fullmatch(name):
            raise InvalidParameter(param, name, "the name of a Secret")
        if secrets.count(name) > 1:
            raise InvalidParameter(param, name, "each Secret once")


def with_timings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings together with the timings of the file that they name. Raise
    InvalidParameter."""
    path = settings.get("timings_file")
    return {**settings, **({} if path is None else values_of_file("timings_file", path, Timings))}


def usual_pod_host(environment: Mapping[str, str]) -> str:
    """Return the host by the API server's address in the cluster, which has the pods' family."""
    return ANY_6 if ":" in environment.get("KUBERNETES_SERVICE_HOST", "") else ANY_4
