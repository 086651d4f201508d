"""Metrics of pulls at both ends, under ``tandem:``; one set per registry."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.protocol.errors import FailCause

SECONDS_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)


class Fallback(StrEnum):
    """Reasons to compute a prefix here that a peer should have, besides causes of failures."""

    CACHED = "cached"
    """The prefix is cached here by now, as far as the router knew of it at the peer."""
    TIER = "tier"
    """The start of the prefix lies in this worker's tier in host memory, which is nearer."""
    NO_LINK = "no_link"
    """No link to the peer is up."""
    LESS = "less"
    """The peer has no more of the prefix than this worker."""


class PullMetrics:
    """Metrics of pulls; counted by the engine's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pulls = Counter(
            "tandem:kv_prefix_pulls",
            "Prompts whose cached start came from a peer instead of being computed.",
            registry=registry,
        )
        self.tokens = Counter(
            "tandem:kv_prefix_pulled_tokens",
            "Prompt tokens whose KV came from a peer's cache.",
            registry=registry,
        )
        self.seconds = Histogram(
            "tandem:kv_prefix_pull_seconds",
            "From asking a peer for a cached prefix to having it.",
            registry=registry,
            buckets=SECONDS_BUCKETS,
        )
        self.fallbacks = Counter(
            "tandem:kv_prefix_pull_fallbacks",
            "Prefixes that were to be pulled and are computed, by why.",
            ["reason"],
            registry=registry,
        )
        self.lent = Counter(
            "tandem:kv_prefix_lent_tokens",
            "Tokens of cached prefixes that were lent to peers.",
            registry=registry,
        )
        self.declined = Counter(
            "tandem:kv_prefix_loans_declined",
            "Peers that asked for a cached prefix and got none of it, by why.",
            ["reason"],
            registry=registry,
        )
        self.open = Gauge(
            "tandem:kv_prefix_pulls_open",
            "Requests here whose start was to be pulled: asked for, come, or computed after all.",
            registry=registry,
        )
        self.lent_blocks = Gauge(
            "tandem:kv_prefix_lent_blocks", "Blocks that are lent to peers.", registry=registry
        )
        for reason in (*Fallback, *FailCause):
            self.fallbacks.labels(str(reason))
        for declined in ("evicted", "leaving", "quota", "refused"):
            self.declined.labels(declined)
