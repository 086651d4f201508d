"""Settings of the router; cli/ turns each field into a flag, a variable and a file key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT

_Value = TypeVar("_Value")


def _setting(default: _Value, text: str, *, unit: str = "") -> _Value:
    """A field that cli/ can show: (help, choices, unit) under the key it looks for."""
    value: _Value = field(default=default, metadata={"setting": (text, (), unit)})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All that ``create_app`` needs. Times are seconds, sizes as named."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(ROUTER_PORT, "Port to listen on.")
    workers: tuple[str, ...] = _setting(
        (), "host:port of a prefill or decode worker; may be given more than once."
    )
    model: str = _setting("", "Prepared model folder; its tokenizer and chat template are used.")
    served_model_name: tuple[str, ...] = _setting(
        (), "Names that clients may ask for; without one, the name that the workers serve."
    )
    trust_request_chat_template: bool = _setting(
        False, "Allow requests to bring a chat template of their own."
    )
    api_key: tuple[str, ...] = _setting(
        (), "Bearer token that /v1 asks for; may be given more than once. None: no check."
    )
    request_timeout: float = _setting(600.0, "Deadline of a request, from arrival to last token.")
    max_attempts: int = _setting(3, "Dispatches of one request over all failures, at most.")
    worker_wait: float = _setting(
        5.0, "How long a request waits for a worker when none that could take it is up."
    )
    accept_timeout: float = _setting(
        30.0, "A worker that has not accepted a request by then has failed the attempt."
    )
    progress_timeout: float = _setting(
        120.0, "An attempt without a token for this long has failed, whatever the beats say."
    )
    min_handoff_tokens: int = _setting(
        16, "Prompts with fewer uncached tokens than this are prefilled by the decode worker."
    )
    prefix_index_mib: int = _setting(256, "Memory for the index of the workers' cached blocks.")
    max_inflight_requests: int = _setting(
        1024, "Requests dispatched at once; further ones wait in the queue."
    )
    max_inflight_tokens: int = _setting(
        16_000_000, "Prompt tokens of the dispatched requests, all together."
    )
    max_queued_requests: int = _setting(
        2048, "Requests that may wait; beyond it a request is answered 429."
    )
    max_queued_tokens: int = _setting(
        32_000_000, "Prompt tokens of waiting requests; beyond it a request is answered 429."
    )
    max_queue_age: float = _setting(60.0, "A request that waited this long is answered 503.")
    max_body_bytes: int = _setting(32 << 20, "Largest body of a request; above it: 413.")
    beat_interval: float = _setting(1.0, "Time between two beats to a worker.")
    beat_timeout: float = _setting(5.0, "A worker that is silent this long is lost.")
    stall_timeout: float = _setting(
        120.0, "A worker that beats but makes no progress with work pending this long is lost."
    )
    ready_prefill: int = _setting(
        0, "Prefill workers with a link to a decode worker before /ready first answers 200."
    )
    ready_decode: int = _setting(1, "Decode workers before /ready first answers 200.")
    drain_timeout: float = _setting(
        30.0, "How long requests under way may take to end after a signal to stop."
    )
    access_log: bool = _setting(False, "Log a line per request.")

    def __post_init__(self) -> None:
        _integer("port", self.port, 0, 65535)
        for name in ("max_attempts", "max_inflight_requests", "max_inflight_tokens"):
            _integer(name, getattr(self, name), 1)
        for name in ("max_body_bytes", "prefix_index_mib", "ready_decode"):
            _integer(name, getattr(self, name), 1)
        for name in ("min_handoff_tokens", "max_queued_requests", "max_queued_tokens"):
            _integer(name, getattr(self, name), 0)
        _integer("ready_prefill", self.ready_prefill, 0)
        for name in ("request_timeout", "accept_timeout", "progress_timeout", "beat_interval"):
            _seconds(name, getattr(self, name))
        for name in ("beat_timeout", "stall_timeout", "max_queue_age", "drain_timeout"):
            _seconds(name, getattr(self, name))
        _seconds("worker_wait", self.worker_wait, or_zero=True)
        if self.beat_timeout <= self.beat_interval:
            raise InvalidParameter(
                "beat_timeout", self.beat_timeout, f"more than beat_interval, {self.beat_interval}"
            )
        for endpoint in self.workers:
            check_endpoint("workers", endpoint)


def check_endpoint(param: str, endpoint: str) -> str:
    """The endpoint, or InvalidParameter unless it is ``host:port`` (``[v6]:port``)."""
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidParameter(param, endpoint, "host:port")
    return endpoint


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(param, value, allowed)
    if value < low or (high is not None and value > high):
        raise InvalidParameter(param, value, allowed)


def _seconds(param: str, value: object, *, or_zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):  # type: ignore[arg-type,operator]
        raise InvalidParameter(param, value, "a number of seconds above 0")
