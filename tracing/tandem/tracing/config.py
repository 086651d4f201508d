"""Settings of tracing, and the W3C header that names a call's trace."""

import re
from dataclasses import dataclass

from tandem.base.settings import check_choices, setting
from tandem.protocol.errors import InvalidParameter

_TRACEPARENT = re.compile(r"([0-9a-f]{2})(-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2})(-.*)?")
_ENDPOINT = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
_WITHOUT_PATH = re.compile(r"https?://[^/]+/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Destination and protocol of spans; part of the settings of router and workers."""

    otlp_traces_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector (OTLP). Default: no spans."
    )
    otlp_traces_protocol: str = setting(
        "grpc", "Protocol of the collector.", choices=("grpc", "http/protobuf")
    )

    def __post_init__(self) -> None:
        check_choices(self)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise InvalidParameter(
                "otlp_traces_endpoint", endpoint, "http:// or https:// and a host"
            )
        by_grpc = endpoint is not None and self.otlp_traces_protocol == "grpc"
        if by_grpc and not _WITHOUT_PATH.fullmatch(endpoint or ""):
            allowed = "no path, unless otlp_traces_protocol is http/protobuf"
            raise InvalidParameter("otlp_traces_endpoint", endpoint, allowed)


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
