"""Flag, variables and network port for ``observability.tracing``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from urllib.parse import urlsplit

from tandem.operator.api.service import LLMServiceSpec
from tandem.tracing.config import ENV_PROTOCOL, ENV_SAMPLER_ARG, GRPC, HTTP

HTTP_PORT = 4318
"""Port of OTLP by HTTP; other ports are gRPC, unless the URL has a path."""
_ENDPOINT = "otlp-traces-endpoint"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def tracing_flags(spec: LLMServiceSpec) -> dict[str, object]:
    """Return the flag of every process; None without an endpoint."""
    endpoint = spec.observability.tracing.endpoint
    return {_ENDPOINT: None if endpoint is None else endpoint.rstrip("/")}


def tracing_env(spec: LLMServiceSpec) -> dict[str, str]:
    """Return OpenTelemetry's variable for every process; none without an endpoint."""
    endpoint = spec.observability.tracing.endpoint
    if endpoint is None:
        return {}
    parsed = urlsplit(endpoint)
    by_http = parsed.path not in ("", "/") or parsed.port == HTTP_PORT
    return {ENV_PROTOCOL: HTTP if by_http else GRPC}


def sampling_env(spec: LLMServiceSpec) -> dict[str, str]:
    """Return the router's variable for the share of calls that begin a trace."""
    if spec.observability.tracing.endpoint is None:
        return {}
    return {ENV_SAMPLER_ARG: f"{(spec.observability.tracing.sample_percent or 0) / 100:g}"}


def tracing_port(spec: LLMServiceSpec) -> int | None:
    """Return the port of the endpoint for network policies."""
    endpoint = spec.observability.tracing.endpoint
    return None if endpoint is None else _port(endpoint)


def kept_tracing_port(arguments: Sequence[str]) -> int | None:
    """Return the same port of an existing command line."""
    given = [value for flag, value in pairwise(arguments) if flag == f"--{_ENDPOINT}"]
    return _port(given[0]) if given else None


def _port(endpoint: str) -> int:
    parsed = urlsplit(endpoint)
    return parsed.port or _DEFAULT_PORTS[parsed.scheme]


def unusable_endpoint(spec: LLMServiceSpec) -> str | None:
    """Return the endpoint if it is unusable."""
    endpoint = spec.observability.tracing.endpoint
    if endpoint is None:
        return None
    try:
        parsed = urlsplit(endpoint)
        usable = bool(parsed.hostname) and (parsed.port or 1) > 0
    except ValueError:
        return endpoint
    blank = any(each.isspace() for each in endpoint)
    usable = usable and not (parsed.query or parsed.fragment or "?" in endpoint or blank)
    return None if usable else endpoint


def unused_share(spec: LLMServiceSpec) -> int | None:
    """Return a sampling share without an endpoint."""
    tracing = spec.observability.tracing
    return tracing.sample_percent if tracing.endpoint is None else None
