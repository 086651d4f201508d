"""Links between workers from a router's ``/debug/fleet``, for the status."""

from __future__ import annotations

import json
import re
import statistics
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any

import msgspec

from tandem.operator.api.status import Links
from tandem.protocol import names

TIMEOUT = 5.0
_MOST = 32
_MOST_REASONS = 2
_MOST_CHARACTERS = 253
"""Maximum characters of a text in the status."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def read_links(base_url: str, expected: int, token: str) -> Links | None:
    """Return the links of the router at ``base_url``, at least ``expected``; None without an
    answer.
    """
    try:
        return links_of(read_fleet(base_url, token, TIMEOUT), expected)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # no answer, or an invalid one


def read_fleet(base_url: str, token: str, timeout: float) -> dict[str, Any]:
    """Return a router's fleet, with the canary's token. Raises OSError or ValueError."""
    headers = {names.HEADER_CANARY: token}
    request = urllib.request.Request(f"{base_url}/debug/fleet", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            fleet = json.load(answer)
    except HTTPException as error:
        raise ConnectionError(f"no complete answer from {base_url}: {error}") from error
    if not isinstance(fleet, dict):
        raise ValueError(f"no answer from {base_url}: not an object")
    return fleet


def links_of(fleet: dict[str, Any], expected: int) -> Links:
    """Return the links of a fleet: up, and not closed by the router."""
    workers, closed = fleet.get("workers", ()), fleet.get("quarantined", ())
    pods = {worker.get("incarnation"): worker.get("pod") for worker in workers}
    states = {
        (peer, worker.get("incarnation")): up
        for worker in workers
        for peer, up in worker.get("peers", {}).items()
    }
    healthy = {pair for pair, up in states.items() if up}
    healthy -= {(link["prefill"], link["decode"]) for link in closed}
    quarantined = [
        f"{_pod(pods, link['prefill'])} to {_pod(pods, link['decode'])}: {link['cause']}"
        for link in closed
    ]
    kinds = {worker.get("compatibility") for worker in workers}
    if len(kinds) > 1 and not all(states.values()):
        quarantined.append(f"workers hold KV of {len(kinds)} kinds: they cannot exchange it")
    found = fleet.get("handoff_links", ())
    return Links(
        healthy=min(len(healthy), expected),
        total=expected,
        transport=fleet.get("transport"),
        median_megabytes_per_second=_median_rate(found),
        quarantined=[each[:_MOST_CHARACTERS] for each in quarantined[:_MOST]],
        down=why_down(found),
    )


def steadied(links: Links, before: Links | None) -> Links:
    """Return ``links`` with the rate of ``before`` if they differ by less than a fifth.

    So the status does not change with each hand-off.
    """
    old = None if before is None else before.median_megabytes_per_second
    new = links.median_megabytes_per_second
    if old is None or new is None or abs(new - old) > old / 5:
        return links
    return msgspec.structs.replace(links, median_megabytes_per_second=old)


def _pod(pods: Mapping[str | None, str | None], incarnation: str) -> str:
    """Return a worker's pod, or its incarnation."""
    return pods.get(incarnation) or incarnation


def _median_rate(links: Iterable[dict[str, Any]]) -> int | None:
    """Return MB/s of the median link with a known rate, at least 1, or None."""
    rates = [rate for each in links if (rate := each.get("gb_per_s") or 0.0) > 0]
    return max(1, round(1000 * statistics.median(rates))) if rates else None


def why_down(links: Iterable[dict[str, Any]]) -> list[str]:
    """Return the most frequent reasons why links are down, with their counts.

    Reasons that differ in numbers only are one.
    """
    reasons = sorted(str(each.get("reason", "")) for each in links if each.get("state") == "down")
    examples: dict[str, str] = {}
    for reason in reasons:
        examples.setdefault(_NUMBER.sub("#", reason), reason)
    counts = Counter(_NUMBER.sub("#", reason) for reason in reasons)
    return [
        f"{number} x {examples[alike] or 'no reason given'}"[:_MOST_CHARACTERS]
        for alike, number in counts.most_common(_MOST_REASONS)
    ]
