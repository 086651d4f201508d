"""Times as Kubernetes writes them (RFC 3339, UTC), as seconds since the epoch."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float) -> str:
    """Return seconds since the epoch as text."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time_text(seconds: float) -> str:
    """Return a time with microseconds, as Leases require."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Return a text as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()
