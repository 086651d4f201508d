"""Requests to this machine go to it, whatever proxy the environment names for others.

``http_proxy`` is for the way out: a proxy cannot reach this machine's loopback, and clients that
follow the variable do not leave it out unless ``no_proxy`` says so.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from urllib.parse import urlsplit

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine's own processes."""


def mounts(url: str) -> dict[str, None]:
    """What httpx takes as ``mounts``: no proxy for the host of ``url`` if that is the loopback."""
    host = urlsplit(url).hostname or ""
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None} if _is_own(host) else {}


def _is_own(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
