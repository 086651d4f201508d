"""Limits of queue, retries, input, memory and connections. ``--limits-file`` changes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tandem.base.settings import check_integer, check_positive, values_of_file, values_of_yaml
from tandem.protocol.embeds import MOST_BYTES
from tandem.protocol.names import ENV_LIMITS
from tandem.protocol.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits by name. Sizes are in bytes and times in seconds, unless the name has another unit."""

    max_inflight_requests: int = 1024
    """Running requests; more wait in the queue."""
    max_inflight_tokens: int = 16_000_000
    """Prompt tokens of running requests together; more wait in the queue."""
    max_queued_requests: int = 2048
    """Waiting requests; above it: 429."""
    max_queued_tokens: int = 32_000_000
    """Prompt tokens of waiting requests; above it: 429."""
    max_queue_age: float = 60.0
    """Wait of a request in the queue; after it: 503."""
    max_attempts: int = 3
    """Failed attempts of a request without a new token. After new tokens up to eight more may fail.
    1: no retry."""

    max_prompts: int = 256
    """Prompts of one call; above it: 400."""
    max_parallel_prompts: int = 64
    """Prompts of one call that run at once; the rest wait."""
    max_sequences: int = 1024
    """Prompts times ``n`` of one call; above it: 400."""
    max_messages: int = 4096
    """Messages of one chat; above it: 400."""
    max_bad_words: int = 1000
    """Entries of ``bad_words``; above it: 400."""
    max_logit_bias: int = 1024
    """Entries of ``logit_bias``; above it: 400."""
    max_text_chars: int = 4_000_000
    """Characters of one text to tokenize, after the chat template; above it: 400."""
    max_prompt_embeds_bytes: int = 16 << 20
    """One decoded prompt of embeddings; above it: 400."""
    max_held_embeds_bytes: int = 512 << 20
    """Prompts of embeddings that wait or run, together; above it: 503."""

    max_body_bytes: int = 32 << 20
    """Body of one request; above it: 413."""
    max_bodies_bytes: int = 512 << 20
    """Bodies that are not parsed yet, together; above it: 503."""
    body_timeout: float = 60.0
    """Time in which a body has to arrive; after it: 408."""
    max_json_values: int = 1_000_000
    """Values of a body, a tenth of it objects and lists; above it: 413."""
    max_json_depth: int = 64
    """Nesting of objects and lists in a body; above it: 400."""

    max_connections: int = 4096
    """Connections of clients; above it: 503. A few more are reserved for probes."""
    max_connections_per_client: int = 0
    """Connections of one address; above it: 503. 0: no limit."""
    max_header_bytes: int = 65_536
    """Request line and headers; above it: 431."""
    max_headers: int = 128
    """Headers of a request; above it: 431."""
    header_timeout: float = 10.0
    """Time in which request line and headers have to arrive; after it: 408."""

    write_timeout: float = 30.0
    """Time after which a connection whose client reads nothing is closed."""
    max_stream_backlog_bytes: int = 4 << 20
    """Unread bytes of one answer; above it for half a second the answer is aborted."""
    max_backlog_bytes: int = 256 << 20
    """Unread bytes of all answers; above it the largest is aborted."""

    max_stored_responses: int = 1024
    """Responses that are kept for later turns; the least recently used is dropped. 0: none."""
    max_stored_response_bytes: int = 128 << 20
    """Size of all stored responses."""
    stored_response_ttl: float = 3600.0
    """Time after its last use for which a response is kept."""

    worker_wait: float = 5.0
    """Wait of a request for a worker if no connected worker can serve it; after it: 503."""
    resume_wait: float = 30.0
    """The same wait if the answer has begun, because its client cannot send it again."""
    accept_timeout: float = 30.0
    """Time in which a worker has to accept a request; after it the attempt has failed."""
    progress_timeout: float = 120.0
    """Time without a token after which an attempt has failed; time in a queue does not count."""
    keep_alive_timeout: float = 620.0
    """Wait of a connection for its next request; longer than that of a proxy before the router."""
    sse_keep_alive: float = 5.0
    """Silence of a stream after which a comment is sent. 0: no comments, and the headers are sent
    with the first token."""
    beat_interval: float = 1.0
    """Time between two heartbeats to a worker; at most 2."""
    beat_timeout: float = 4.0
    """Silence after which a worker is lost; at least 2."""
    stall_timeout: float = 120.0
    """Time without progress after which a worker with pending work is lost."""

    prefix_index_mib: int = 256
    """Memory for the index of the workers' cached blocks."""
    timeline_requests: int = 1000
    """Last calls whose timelines are kept for /debug/requests. 0: none."""
    timeline_mib: int = 16
    """Memory for these timelines."""

    def check_limits(self) -> None:
        """Raise InvalidParameter for a limit that is out of its range."""
        for each in fields(Limits):
            value = getattr(self, each.name)
            if each.name in _RANGES:
                check_integer(each.name, value, *_RANGES[each.name])
            else:
                check_positive(each.name, value, or_zero=each.name in _MAY_BE_ZERO)


_RANGES: dict[str, tuple[int, int | None]] = {
    "max_inflight_requests": (1, None),
    "max_inflight_tokens": (1, None),
    "max_queued_requests": (0, None),
    "max_queued_tokens": (0, None),
    "max_attempts": (1, None),
    "max_prompts": (1, 65_536),
    "max_parallel_prompts": (1, 65_536),
    "max_sequences": (1, 65_536),
    "max_messages": (1, 1 << 20),
    "max_bad_words": (0, MAX_BAD_WORDS),
    "max_logit_bias": (0, MAX_LOGIT_BIAS),
    "max_text_chars": (1, 1 << 30),
    "max_prompt_embeds_bytes": (1, MOST_BYTES),
    "max_held_embeds_bytes": (1, None),
    "max_body_bytes": (1, None),
    "max_bodies_bytes": (1, None),
    "max_json_values": (1_000, 1 << 30),
    "max_json_depth": (8, 128),
    "max_connections": (1, 1 << 20),
    "max_connections_per_client": (0, 1 << 20),
    "max_header_bytes": (1_024, 1 << 20),
    "max_headers": (8, 10_000),
    "max_stream_backlog_bytes": (1 << 10, None),
    "max_backlog_bytes": (1 << 10, None),
    "max_stored_responses": (0, 1 << 20),
    "max_stored_response_bytes": (1 << 10, None),
    "prefix_index_mib": (1, None),
    "timeline_requests": (0, 1 << 20),
    "timeline_mib": (1, None),
}
"""Smallest and largest value of each limit that is a whole number; others are seconds above 0."""
_MAY_BE_ZERO = frozenset({"worker_wait", "resume_wait", "sse_keep_alive"})


def with_limits(settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of a router together with the limits of ENV_LIMITS, and of the file that
    they name, which has precedence.

    Raise InvalidParameter if either is not a YAML mapping of limits.
    """
    limits: dict[str, Any] = {}
    if text := environ.get(ENV_LIMITS):
        limits |= values_of_yaml(ENV_LIMITS, text, Limits)
    if (path := settings.get("limits_file")) is not None:
        limits |= values_of_file("limits_file", path, Limits)
    return {**settings, **limits}
