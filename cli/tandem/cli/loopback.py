"""Requests to this machine without the proxy that the environment sets for other hosts.

``http_proxy`` is for outgoing requests: a proxy cannot reach this machine's loopback. Clients that
follow the variable use it for the loopback too, unless ``no_proxy`` excludes it.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from urllib.parse import urlsplit

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener for URLs of this machine's own processes."""


def mounts(url: str) -> dict[str, None]:
    """Return httpx's ``mounts`` without a proxy, if the host of ``url`` is the loopback."""
    host = urlsplit(url).hostname or ""
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None} if _is_own(host) else {}


def _is_own(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
