"""Settings of the router; cli/ turns each field into a flag, a variable and a file key."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT
from tandem.protocol.settings import check_choices, check_integer, check_positive, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All that ``create_app`` needs. Times are seconds, sizes as named."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(ROUTER_PORT, "Port to listen on.")
    workers: tuple[str, ...] = setting(
        (), "host:port of a prefill or decode worker; may be given more than once."
    )
    model: str = setting("", "Prepared model folder; its tokenizer and chat template are used.")
    served_model_name: tuple[str, ...] = setting(
        (), "Names that clients may ask for; without one, the name that the workers serve."
    )
    trust_request_chat_template: bool = setting(
        False, "Allow requests to bring a chat template of their own."
    )
    api_key: tuple[str, ...] = setting(
        (), "Bearer token that /v1 asks for; may be given more than once. None: no check."
    )
    request_timeout: float = setting(600.0, "Deadline of a request, from arrival to last token.")
    max_attempts: int = setting(3, "Dispatches of one request over all failures, at most.")
    worker_wait: float = setting(
        5.0, "How long a request waits for a worker when none that could take it is up."
    )
    accept_timeout: float = setting(
        30.0, "A worker that has not accepted a request by then has failed the attempt."
    )
    progress_timeout: float = setting(
        120.0,
        "An attempt without a token for this long has failed, whatever the beats say; time in the "
        "queue of a worker that moves does not count.",
    )
    min_handoff_tokens: int = setting(
        16, "Prompts with fewer uncached tokens than this are prefilled by the decode worker."
    )
    prefix_index_mib: int = setting(256, "Memory for the index of the workers' cached blocks.")
    max_inflight_requests: int = setting(
        1024, "Requests dispatched at once; further ones wait in the queue."
    )
    max_inflight_tokens: int = setting(
        16_000_000, "Prompt tokens of the dispatched requests, all together."
    )
    max_queued_requests: int = setting(
        2048, "Requests that may wait; beyond it a request is answered 429."
    )
    max_queued_tokens: int = setting(
        32_000_000, "Prompt tokens of waiting requests; beyond it a request is answered 429."
    )
    max_queue_age: float = setting(60.0, "A request that waited this long is answered 503.")
    max_body_bytes: int = setting(32 << 20, "Largest body of a request; above it: 413.")
    body_timeout: float = setting(60.0, "Time that the body of a request may take to come.")
    beat_interval: float = setting(1.0, "Time between two beats to a worker.")
    beat_timeout: float = setting(5.0, "A worker that is silent this long is lost.")
    stall_timeout: float = setting(
        120.0, "A worker that beats but makes no progress with work pending this long is lost."
    )
    ready_prefill: int = setting(
        0, "Prefill workers with a link to a decode worker before /ready first answers 200."
    )
    ready_decode: int = setting(1, "Decode workers before /ready first answers 200.")
    drain_timeout: float = setting(
        30.0, "How long requests under way may take to end after a signal to stop."
    )
    api_keys_dir: str | None = setting(
        None, "Folder whose files hold one accepted API key each; read anew when it changes."
    )
    canary_token_file: str | None = setting(
        None, "File with the token that lets the operator's canary choose its way."
    )
    discovery: str = setting(
        "static",
        "static: workers are those of --workers. kubernetes: the pods that the selector finds.",
        choices=("static", "kubernetes"),
    )
    discovery_namespace: str = setting("", "Namespace of the worker pods.")
    discovery_selector: str = setting("", "Label selector of the worker pods.")
    curve_keys: str | None = setting(
        None, "Folder with the router's CURVE key pair; none: links are neither checked nor hidden."
    )
    curve_peers: str | None = setting(
        None, "Folder with the public keys of all roles, ROLE.GENERATION.public each."
    )
    access_log: bool = setting(False, "Log a line per request.")

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65535)
        for name in ("max_attempts", "max_inflight_requests", "max_inflight_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_body_bytes", "prefix_index_mib", "ready_decode"):
            check_integer(name, getattr(self, name), 1)
        for name in ("min_handoff_tokens", "max_queued_requests", "max_queued_tokens"):
            check_integer(name, getattr(self, name), 0)
        check_integer("ready_prefill", self.ready_prefill, 0)
        for name in (
            "request_timeout",
            "accept_timeout",
            "progress_timeout",
            "beat_interval",
            "body_timeout",
        ):
            check_positive(name, getattr(self, name))
        for name in (
            "beat_timeout",
            "stall_timeout",
            "body_timeout",
            "max_queue_age",
            "drain_timeout",
        ):
            check_positive(name, getattr(self, name))
        check_positive("worker_wait", self.worker_wait, or_zero=True)
        if self.beat_timeout <= self.beat_interval:
            raise InvalidParameter(
                "beat_timeout", self.beat_timeout, f"more than beat_interval, {self.beat_interval}"
            )
        check_choices(self)
        if self.discovery == "kubernetes":
            for name in ("discovery_namespace", "discovery_selector"):
                if not getattr(self, name):
                    raise InvalidParameter(name, "", "a value, as discovery is kubernetes")
        for endpoint in self.workers:
            check_endpoint("workers", endpoint)


def check_endpoint(param: str, endpoint: str) -> str:
    """The endpoint, or InvalidParameter unless it is ``host:port`` (``[v6]:port``)."""
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidParameter(param, endpoint, "host:port")
    return endpoint
