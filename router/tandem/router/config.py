"""Settings of the router; cli/ turns each field into a flag, a variable and a file key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.base.listening import PLAINTEXT_HELP, REMEDY, check_exposed
from tandem.base.settings import (
    check_integer,
    check_positive,
    setting,
)
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.link import WORKER_BEAT_SECONDS, WORKER_PATIENCE_SECONDS
from tandem.protocol.messages import TARGET_ITL_MS
from tandem.protocol.names import ROUTER_PORT
from tandem.router.limits import Limits
from tandem.router.placement.forecast import Targets
from tandem.router.placement.policy import PlacementPolicy
from tandem.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.text.parsers.model import check_name
from tandem.tracing.config import TracingConfig

MAX_INTERVAL = 2.0
"""Maximum interval of beats, so that a lost one is within the workers' patience."""
MIN_TIMEOUT = 2 * WORKER_BEAT_SECONDS


def check_beats(interval: float, timeout: float) -> None:
    """Raise InvalidParameter for intervals that do not fit the workers' or each other."""
    if interval > MAX_INTERVAL:
        patience = f"a worker takes {WORKER_PATIENCE_SECONDS:g} s of silence for the router's end"
        raise InvalidParameter("beat_interval", interval, f"at most {MAX_INTERVAL:g}: {patience}")
    if timeout < MIN_TIMEOUT:
        throughput = f"a worker beats every {WORKER_BEAT_SECONDS:g} s"
        raise InvalidParameter("beat_timeout", timeout, f"at least {MIN_TIMEOUT:g}: {throughput}")
    if timeout <= interval:
        raise InvalidParameter("beat_timeout", timeout, f"more than beat_interval, {interval}")


_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]*[A-Za-z0-9_~-])+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#,]+")


HANDOFF_PATIENCE = 0.05
"""Default in seconds."""
TARGET_TTFT_MS = 300.0

_BOUNDS: dict[str, tuple[int, int | None]] = {
    "port": (0, 65_535),
    "grpc_port": (0, 65_535),
    "ready_prefill": (0, None),
    "ready_decode": (0, None),
}
"""Minimum and maximum of integers."""


MIN_SSE_KEEP_ALIVE = 0.02


@dataclass(frozen=True, kw_only=True)
class RouterConfig(TracingConfig, Limits):
    """Settings of the router. Times are in seconds."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(ROUTER_PORT, "Port to listen on.")
    grpc_port: int = setting(0, "Port for gRPC, in addition to HTTP; 0: none.")
    workers: tuple[str, ...] = setting((), "host:port of a prefill or decode worker; repeatable.")
    model: str = setting("", "Prepared model folder, for its tokenizer and chat template.")
    served_model_name: tuple[str, ...] = setting(
        (), "Names of the model in requests. Default: the workers' name."
    )
    trust_request_chat_template: bool = setting(False, "Allow chat templates in requests.")
    enable_tokenizer_info_endpoint: bool = setting(
        False, "Serve the tokenizer's settings and the chat template at GET /tokenizer_info."
    )
    tool_call_parser: str = setting(
        "auto",
        "Format of tool calls, by vLLM's names. auto: from the chat template; none: calls stay "
        "in the text.",
    )
    reasoning_parser: str = setting(
        "auto",
        "Format of reasoning, by vLLM's names. auto: from the chat template; none: reasoning"
        " stays in the text.",
    )
    allow_request_priority: bool = setting(
        False, "Allow requests to set their priority in the queues."
    )
    ignore_unknown_fields: bool = setting(
        False, "Accept fields with unknown names instead of answering 400."
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "Origin of allowed web pages, or *; repeatable. Default: no CORS."
    )
    root_path: str = setting(
        "",
        "Path prefix that a proxy keeps, such as /llm. Routes are also served below it.",
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "Host header to accept on a loopback address, in addition to loopback names; repeatable.",
    )
    allow_credentials: bool = setting(
        False, "Let browsers send cookies; only with origins by name."
    )
    api_key: tuple[str, ...] = setting((), "API key of clients; repeatable. Default: no check.")
    admin_api_key: tuple[str, ...] = setting(
        (),
        "API key of administrators (/sleep, /abort_requests, /start_profile and others), valid "
        "for all paths; repeatable.",
    )
    admin_api_keys_dir: str | None = setting(
        None, "Folder with one administrators' key per file. Changed files are read again."
    )
    enable_admin_api: bool = setting(
        False, "Allow administration without a key; only if there are no keys at all."
    )
    share_prefix_cache: bool = setting(
        False,
        "Share cached prefixes between API keys. The time and cached_tokens of an answer "
        "then reveal what other clients sent.",
    )
    request_timeout: float = setting(
        600.0, "Deadline of a request, from arrival to last token.", unit="s"
    )
    strict_handoff: bool = setting(
        False,
        "Hand off every prompt while a prefill worker and its link are up. Default: use the way "
        "with the least predicted cost.",
    )
    handoff_patience: float | None = setting(
        None,
        "Difference in cost above which one worker serves a prompt instead of a hand-off. "
        f"Default: {HANDOFF_PATIENCE:g}. Not allowed with --strict-handoff.",
        unit="s",
    )
    target_ttft_ms: float = setting(
        TARGET_TTFT_MS,
        "Target for the time to the first token. A predicted miss adds to the cost of a way.",
    )
    target_itl_ms: float = setting(
        TARGET_ITL_MS,
        "Target for the time between tokens. A predicted miss adds to the cost of a way.",
    )
    limits_file: str | None = setting(
        None,
        "YAML file with limits of the queue, retries, requests and connections "
        "(docs/reference/limits.md).",
    )
    ready_prefill: int = setting(
        0,
        "Number of prefill workers linked to a decode worker before /ready first answers 200. "
        "Without decode workers, links are not required.",
    )
    ready_decode: int = setting(
        1,
        "Number of decode workers before /ready first answers 200. 0: one worker of either role, "
        "as for a model that samples no tokens.",
    )
    drain_timeout: float = setting(
        30.0, "Time for running requests after a signal to stop.", unit="s"
    )
    api_keys_dir: str | None = setting(
        None,
        "Folder with one clients' key per file. Changed files are read again.",
    )
    canary_token_file: str | None = None
    """File with the token of the operator's canary, by ENV_CANARY_TOKEN_FILE."""
    discovery_selector: str = setting(
        "",
        "Label selector of worker pods in the router's own namespace, instead of --workers. "
        "/health then answers 200 while the process runs.",
    )
    curve_keys: str | None = setting(
        None,
        "Folder with the router's CURVE key pair. Default: links without authentication and "
        "encryption.",
    )
    curve_peers: str | None = setting(
        None, "Folder with the public keys of all roles, in files ROLE.GENERATION.public."
    )
    allow_plaintext: bool = setting(False, PLAINTEXT_HELP)
    ui: bool = setting(True, "Serve the live page at /ui; its data requires a key if there is one.")
    access_log: bool = setting(False, "Log a line for each request.")

    def __post_init__(self) -> None:
        TracingConfig.__post_init__(self)
        for name, (low, high) in _BOUNDS.items():
            check_integer(name, getattr(self, name), low, high)
        self.check_limits()
        for name in ("request_timeout", "drain_timeout"):
            check_positive(name, getattr(self, name))
        if 0 < self.sse_keep_alive < MIN_SSE_KEEP_ALIVE:
            allowed = f"0, or {MIN_SSE_KEEP_ALIVE:g} seconds or more"
            raise InvalidParameter("sse_keep_alive", self.sse_keep_alive, allowed)
        self._check_placement()
        check_beats(self.beat_interval, self.beat_timeout)
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise InvalidParameter("allow_credentials", True, "only with allowed_origins by name")
        check_origins(self.allowed_origins)
        check_name("tool_call_parser", self.tool_call_parser, TOOL_FORMATS)
        check_name("reasoning_parser", self.reasoning_parser, REASONING_FORMATS)
        if self.discovery_selector and self.workers:
            raise InvalidParameter(
                "discovery_selector", self.discovery_selector, "none with workers"
            )
        for endpoint in self.workers:
            check_endpoint("workers", endpoint)
        self._check_secrets()
        self._check_root_path()

    @property
    def health_waits(self) -> bool:
        """Return whether ``/health`` waits until the fleet can serve."""
        return not self.discovery_selector

    def _check_root_path(self) -> None:
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            allowed = "a path such as /llm, without / at its end; letters, digits, ., _, ~ and -"
            raise InvalidParameter("root_path", self.root_path, allowed)

    def _check_placement(self) -> None:
        if self.handoff_patience is not None:
            check_positive("handoff_patience", self.handoff_patience, or_zero=True)
            if self.strict_handoff:
                allowed = "none with strict_handoff"
                raise InvalidParameter("handoff_patience", self.handoff_patience, allowed)
        check_positive("target_ttft_ms", self.target_ttft_ms)
        check_positive("target_itl_ms", self.target_itl_ms)

    def placement_policy(self) -> PlacementPolicy:
        targets = Targets(self.target_ttft_ms / 1000, self.target_itl_ms / 1000)
        patience = HANDOFF_PATIENCE if self.handoff_patience is None else self.handoff_patience
        return PlacementPolicy(targets, patience, strict=self.strict_handoff)

    def _check_secrets(self) -> None:
        for name in ("api_key", "admin_api_key"):
            if not all(key.strip() for key in getattr(self, name)):
                raise InvalidParameter(name, "", "a key of at least one character")
        for name in ("api_keys_dir", "admin_api_keys_dir", "canary_token_file"):
            if getattr(self, name) == "":
                raise InvalidParameter(name, "", "a path, or unset")
        keys = (self.api_key, self.api_keys_dir, self.admin_api_key, self.admin_api_keys_dir)
        if self.enable_admin_api and any(keys):
            allowed = "only without API keys; otherwise set an administration key"
            raise InvalidParameter("enable_admin_api", True, allowed)
        curve = self.curve_keys is not None and self.curve_peers is not None
        if self.discovery_selector and not (curve or self.allow_plaintext):
            raise InvalidParameter("discovery_selector", self.discovery_selector, f"none, {REMEDY}")
        for endpoint in self.workers:
            host = endpoint.rpartition(":")[0]
            check_exposed("workers", host, curve=curve, allow_plaintext=self.allow_plaintext)


def check_origins(origins: tuple[str, ...]) -> None:
    """Raise InvalidParameter for a value that is not an origin of a page."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InvalidParameter("allowed_origins", origin, "* or SCHEME://HOST[:PORT]")


def check_endpoint(param: str, endpoint: str) -> str:
    """Return ``host:port`` or ``[v6]:port``. Raises InvalidParameter for others."""
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidParameter(param, endpoint, "host:port")
    return endpoint
