"""Settings of tracing, and the W3C header that names a call's trace."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.base.settings import check_share, setting
from tandem.protocol.errors import InvalidParameter

_TRACEPARENT = re.compile(r"([0-9a-f]{2})(-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2})(-.*)?")
_ENDPOINT = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
_WITHOUT_PATH = re.compile(r"https?://[^/]+/?")
ENV_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""Variable of OpenTelemetry, in addition to OTEL_EXPORTER_OTLP_PROTOCOL for all signals."""
ENV_SAMPLER = "OTEL_TRACES_SAMPLER"
ENV_SAMPLER_ARG = "OTEL_TRACES_SAMPLER_ARG"
GRPC, HTTP = "grpc", "http/protobuf"
_RATIO = "parentbased_traceidratio"
_FIXED_RATIOS = {"parentbased_always_on": 1.0, "parentbased_always_off": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Destination of spans; part of the settings of router, workers and operator."""

    otlp_traces_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector (OTLP). Default: no spans."
    )

    def __post_init__(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if endpoint is None:
            return
        if not _ENDPOINT.fullmatch(endpoint):
            raise InvalidParameter(
                "otlp_traces_endpoint", endpoint, "http:// or https:// and a host"
            )
        if traces_protocol(os.environ) == GRPC and not _WITHOUT_PATH.fullmatch(endpoint):
            allowed = f"no path, unless {ENV_PROTOCOL} is {HTTP}"
            raise InvalidParameter("otlp_traces_endpoint", endpoint, allowed)
        sampled_share(os.environ)


def traces_protocol(environ: Mapping[str, str]) -> str:
    """Return the protocol of OpenTelemetry's variables; gRPC by default. Raise InvalidParameter."""
    for name in (ENV_PROTOCOL, "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if value := environ.get(name):
            if value not in (GRPC, HTTP):
                raise InvalidParameter(name, value, f"one of {GRPC}, {HTTP}")
            return value
    return GRPC


def sampled_share(environ: Mapping[str, str]) -> float:
    """Return the sampled share of new traces, by OpenTelemetry's variables. Raise
    InvalidParameter.
    """
    sampler = environ.get(ENV_SAMPLER) or _RATIO
    if sampler in _FIXED_RATIOS:
        return _FIXED_RATIOS[sampler]
    if sampler != _RATIO:
        allowed = ", ".join((_RATIO, *_FIXED_RATIOS))
        raise InvalidParameter(ENV_SAMPLER, sampler, f"one of {allowed}")
    text = environ.get(ENV_SAMPLER_ARG) or "1"
    try:
        ratio = float(text)
    except ValueError:
        raise InvalidParameter(ENV_SAMPLER_ARG, text, "a number from 0 to 1") from None
    check_share(ENV_SAMPLER_ARG, ratio)
    return ratio


def traceparent_of(value: str) -> str:
    """Return the header in its first version; empty unless it names a valid trace and span.

    W3C requires reading the known fields of later versions.
    """
    found = _TRACEPARENT.fullmatch(value)
    if found is None:
        return ""
    number, ids, trace, span, more = found.groups()
    if number == "ff" or (number == "00" and more) or not (trace.strip("0") and span.strip("0")):
        return ""
    return "00" + ids


def is_sampled(traceparent: str) -> bool:
    """Return whether the header's sampled bit is set."""
    return bool(traceparent) and bool(int(traceparent[53:55], 16) & 1)
