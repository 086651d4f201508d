"""What a router says about links between workers (``/debug/fleet``), as the status shows it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any

from tandem.operator.api.status import Links
from tandem.protocol import names

TIMEOUT = 5.0
_MOST = 32
_MOST_REASONS = 2
_MOST_CHARACTERS = 253
"""Of a text in the status."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def read_links(base_url: str, expected: int, token: str) -> Links | None:
    """Links as the router at ``base_url`` sees them; ``expected`` pairs at least. None: no word."""
    try:
        return links_of(read_fleet(base_url, token, TIMEOUT), expected)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # nothing came, or something of another shape


def read_fleet(base_url: str, token: str, timeout: float) -> dict[str, Any]:
    """What a router says of its fleet; the canary's token passes its API keys. Raises OSError or
    ValueError."""
    headers = {names.HEADER_CANARY: token}
    request = urllib.request.Request(f"{base_url}/debug/fleet", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            fleet = json.load(answer)
    except HTTPException as error:
        raise ConnectionError(f"no whole answer from {base_url}: {error}") from error
    if not isinstance(fleet, dict):
        raise ValueError(f"no answer from {base_url}: not an object")
    return fleet


def links_of(fleet: dict[str, Any], expected: int) -> Links:
    """Links from the router's own words."""
    states = [up for worker in fleet.get("workers", ()) for up in worker.get("peers", {}).values()]
    quarantined = [
        f"{link['prefill']} to {link['decode']}: {link['cause']}"
        for link in fleet.get("quarantined", ())
    ]
    kinds = {worker.get("compatibility") for worker in fleet.get("workers", ())}
    if len(kinds) > 1 and not all(states):
        quarantined.append(f"workers hold KV of {len(kinds)} kinds: they cannot exchange it")
    healthy = max(0, sum(map(bool, states)) - len(fleet.get("quarantined", ())))
    return Links(
        healthy=min(healthy, expected),
        total=expected,
        transport=fleet.get("transport"),
        quarantined=quarantined[:_MOST],
        down=why_down(fleet.get("handoff_links", ())),
    )


def why_down(links: Iterable[dict[str, Any]]) -> list[str]:
    """Why links are down: the reasons that most of ``links`` (``handoff_links`` of a fleet) give,
    each with how many do. Reasons that differ in numbers alone, as measured rates do, are one, told
    in the words of the first by alphabet."""
    reasons = sorted(str(each.get("reason", "")) for each in links if each.get("state") == "down")
    said: dict[str, str] = {}
    for reason in reasons:
        said.setdefault(_NUMBER.sub("#", reason), reason)
    counts = Counter(_NUMBER.sub("#", reason) for reason in reasons)
    return [
        f"{number} x {said[alike] or 'no reason given'}"[:_MOST_CHARACTERS]
        for alike, number in counts.most_common(_MOST_REASONS)
    ]
