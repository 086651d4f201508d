"""OpenTelemetry spans of one process.

A separate thread makes spans from recorded times. Only spans whose ids are sent to other processes
begin at once. Without an endpoint, OpenTelemetry is not imported.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.link import tandem_version
from tandem.protocol.names import ENV_POD_NAME, ENV_POD_NAMESPACE
from tandem.tracing.config import GRPC, TracingConfig, sampled_share, traces_protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_PORT = re.compile(r":[0-9]+$")
logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Maximum calls whose spans are not made yet; spans of further ones are dropped."""
CLOSE_SECONDS = 3.0
"""Maximum seconds to send spans at the end."""

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


class OpenSpan:
    """Span that has begun, and may be the parent of others."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Any, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def sampled(self) -> bool:
        return self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """Return the traceparent header that makes other spans children of this one."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self, name: str, begin: float, kind: str = "internal", attributes: Attributes | None = None
    ) -> OpenSpan:
        """Begin a child span; ``begin`` in seconds of the wall clock."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            SpanKind[kind.upper()],
            attributes=attributes,
            start_time=_ns(begin),
        )
        return OpenSpan(self._tracer, span)

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, attributes, timestamp=_ns(at))

    def end(
        self, at: float, attributes: Attributes | None = None, error: str | None = None
    ) -> None:
        """End the span; with ``error`` it failed."""
        if attributes:
            self._span.set_attributes(attributes)
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_ns(at))


class Spans:
    """Spans of a process. ``close`` sends the remaining ones."""

    def __init__(
        self,
        config: TracingConfig,
        service: str,
        instance: str,
        *,
        begins_traces: bool = False,
        namespace: str = "",
    ) -> None:
        """Start the thread. Raises InvalidParameter if the SDK is not installed.

        ``begins_traces``: sample new traces by OTEL_TRACES_SAMPLER; other calls follow their
        trace. ``namespace``: of the pod, if its environment has none.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

            exporter = _exporter(config)
        except ImportError as error:
            allowed = "nothing, unless tandem-serving[tracing] is installed"
            raise InvalidParameter(
                "otlp_traces_endpoint", config.otlp_traces_endpoint, allowed
            ) from error
        root = TraceIdRatioBased(sampled_share(os.environ) if begins_traces else 0.0)
        named = {
            "service.name": service,
            "service.namespace": "tandem",
            "service.version": tandem_version(),
            "service.instance.id": instance,
            **_pod(namespace),
        }
        self._provider = TracerProvider(
            ParentBased(root), Resource.create(named), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem", tandem_version())
        self._work: Queue[Callable[[], None] | None] = Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="tandem-spans", daemon=True)
        self._thread.start()
        self._ending: threading.Thread | None = None
        self.dropped = 0
        """Number of calls whose spans were dropped."""

    def begin(
        self, name: str, begin: float, traceparent: str, tracestate: str = "", kind: str = "server"
    ) -> OpenSpan:
        """Begin a span under ``traceparent``, or a trace's first span if it is empty."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": traceparent, "tracestate": tracestate}
        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(name, context, SpanKind[kind.upper()], start_time=_ns(begin))
        return OpenSpan(self._tracer, span)

    def later(self, work: Callable[[], None]) -> None:
        """Queue a call that makes spans. Never waits."""
        try:
            self._work.put_nowait(work)
        except Full:
            if not self.dropped:
                logger.warning("spans of calls are dropped: %d wait to be made", MAX_WAITING)
            self.dropped += 1

    def close(self) -> None:
        """Make and send the remaining spans within CLOSE_SECONDS. May be called twice.

        The SDK itself has no deadline of a flush.
        """
        if self._ending is not None:
            return
        if self.dropped:
            logger.warning("spans of %d calls were dropped: too many waited", self.dropped)
        self._ending = threading.Thread(target=self._end, name="tandem-spans-end", daemon=True)
        self._ending.start()
        self._ending.join(CLOSE_SECONDS)
        if self._ending.is_alive():
            logger.warning("spans that could not be sent within %g s are lost", CLOSE_SECONDS)

    def _end(self) -> None:
        with suppress(Full):
            self._work.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        self._provider.shutdown()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("spans of a call could not be made")


def _exporter(config: TracingConfig) -> SpanExporter:
    endpoint = config.otlp_traces_endpoint
    assert endpoint is not None, "asked for only where there is one"
    if traces_protocol(os.environ) == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(with_port(endpoint), insecure=endpoint.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HTTPExporter,
    )

    host = endpoint.partition("://")[2]
    return HTTPExporter(endpoint if "/" in host else f"{endpoint}/v1/traces")


def with_port(endpoint: str) -> str:
    """Return a URL with its scheme's port if it names none.

    gRPC would use 443 for any scheme.
    """
    scheme, _, rest = endpoint.rstrip("/").partition("://")
    if _PORT.search(rest):
        return endpoint
    return f"{scheme}://{rest}:{80 if scheme == 'http' else 443}"


def _pod(namespace: str) -> dict[str, str]:
    """Return a pod's attributes from its environment; {} elsewhere."""
    name = os.environ.get(ENV_POD_NAME, "")
    if not name:
        return {}
    there = namespace or os.environ.get(ENV_POD_NAMESPACE, "")
    return {"k8s.pod.name": name} | ({"k8s.namespace.name": there} if there else {})


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
