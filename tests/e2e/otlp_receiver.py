"""A receiver of OTLP spans, by gRPC and by HTTP, as a collector has them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs


class Receiver:
    """Both servers on ports of the kernel's choice; ``spans`` are all that came."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        stubs.add_TraceServiceServicer_to_server(_Grpc(self), self._grpc)  # type: ignore[no-untyped-call]
        self.grpc_url = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces", self.path
                receiver.take(service.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http_url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def take(self, request: Any) -> None:
        with self._lock:
            for resource in request.resource_spans:
                named = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [_plain(span, named) for span in scope.spans]

    def of(self, trace_id: str) -> list[dict[str, Any]]:
        with self._lock:
            return [span for span in self.spans if span["trace"] == trace_id]

    def named(self, name: str) -> list[dict[str, Any]]:
        with self._lock:
            return [span for span in self.spans if span["name"] == name]

    def close(self) -> None:
        self._grpc.stop(None)
        self._http.shutdown()
        self._http.server_close()


class _Grpc(stubs.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, _context: Any) -> Any:
        self._receiver.take(request)
        return service.ExportTraceServiceResponse()


def _plain(span: Any, resource: dict[str, str]) -> dict[str, Any]:
    return {
        "service": resource["service.name"],
        "resource": resource,
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "begin": span.start_time_unix_nano / 1e9,
        "end": span.end_time_unix_nano / 1e9,
        "error": span.status.code == 2,
        "events": [event.name for event in span.events],
        "attributes": {each.key: _value(each.value) for each in span.attributes},
    }


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
